/* test_tables.c - slots, copied bytes and regions under random use, against a plain model.
 *
 * Compiled and run by tests/test_native.py and `make native`; arguments: [steps [seed]]. What is
 * taken is written to its last byte and compared before it is given back, so two owners of one byte
 * show, as does memory outside of what was asked for (to the sanitizers, or to Valgrind).
 */
#include "internal.h"

#include "check.h"

#include <errno.h>
#include <string.h>

/* ---- table.c ---- */

#define HELD 1500

struct element {
    struct slot slot;
    uint64_t mark[11];
};

static void slots_and_their_tokens(uint64_t steps)
{
    static struct element *held[HELD];
    static uint64_t tokens[HELD], stale[HELD];
    struct table t;
    uint32_t live = 0, most = 0;
    table_init(&t, sizeof(struct element));
    for (check_step = 1; check_step <= steps; check_step++) {
        uint32_t i = draw(HELD);
        if (held[i] && draw(3)) {
            for (int k = 0; k < 11; k++)
                CHECK(held[i]->mark[k] == tokens[i] + (uint64_t)k);
            stale[i] = tokens[i];
            table_free(&t, held[i]);
            held[i] = NULL;
            live--;
        } else if (!held[i]) {
            struct element *e = held[i] = table_new(&t);
            CHECK(e && (uintptr_t)e % 64 == 0);
            tokens[i] = e->slot.token;
            CHECK(tokens[i] && !(tokens[i] >> 56)); /* fits beside a type, and is never 0 */
            for (int k = 0; k < 11; k++) {
                CHECK(!e->mark[k]);
                e->mark[k] = tokens[i] + (uint64_t)k;
            }
            live++;
        }
        if (live > most)
            most = live;
        uint32_t j = draw(HELD);
        CHECK(!held[j] || table_get(&t, tokens[j]) == held[j]);
        CHECK(!held[j] || table_at(&t, (uint32_t)tokens[j]) == held[j]);
        CHECK(!stale[j] || !table_get(&t, stale[j])); /* whoever has the slot now */
        CHECK(t.live == live && table_slots(&t) >= most && table_slots(&t) < most + 512);
    }
    CHECK(!table_get(&t, UINT64_MAX) && !table_get(&t, 0));
    table_destroy(&t);
    CHECK(!table_slots(&t));
}

/* A slot's generation is 24 bits wide: it comes round, and never to 0. */
static void generations_come_round(void)
{
    struct table t;
    table_init(&t, sizeof(struct slot));
    uint64_t first = 0;
    for (uint32_t i = 0; i < 0x1000002; i++) {
        struct slot *s = table_new(&t);
        uint64_t token = s->token;
        CHECK(token >> 32 && token >> 32 <= 0xffffff);
        if (i == 0)
            first = token;
        CHECK((token == first) == (i % 0xffffff == 0));
        table_free(&t, s);
    }
    table_destroy(&t);
}

/* ---- slab.c ---- */

#define CHUNKS 400

static void copied_bytes(uint64_t steps)
{
    static struct chunk *held[CHUNKS];
    static size_t sizes[CHUNKS];
    struct azc_reactor *r = calloc(1, sizeof *r);
    CHECK(r);
    size_t most = 0, live = 0;
    for (check_step = 1; check_step <= steps; check_step++) {
        uint32_t i = draw(CHUNKS);
        struct chunk *k = held[i];
        if (k) {
            for (size_t b = 0; b < sizes[i]; b += 1 + sizes[i] / 50)
                CHECK(k->data[b] == (char)(i + b));
            CHECK(k->data[sizes[i] - 1] == (char)(i + sizes[i] - 1));
            live -= k->cap + sizeof *k;
            chunk_free(r, k);
            held[i] = NULL;
            continue;
        }
        /* Around the classes, and beyond the largest. */
        size_t want = draw(4) ? 1 + draw(2000) : ((size_t)512 << draw(9)) - draw(200);
        k = held[i] = chunk_new(r, want);
        CHECK(k && k->cap >= want && !k->used && k->op.kind == OP_CHUNK && !k->op.pins);
        CHECK((uintptr_t)k->data % 16 == 0);
        sizes[i] = k->cap;
        for (size_t b = 0; b < k->cap; b++)
            k->data[b] = (char)(i + b);
        live += k->cap + sizeof *k;
        if (live > most)
            most = live;
    }
    /* What is given back is used again: never more than was live at once, in whole classes. */
    CHECK(r->slab.n_blocks * (256u << 10) <= 3 * most + (1u << 20));
    for (uint32_t i = 0; i < CHUNKS; i++)
        if (held[i])
            chunk_free(r, held[i]);
    slab_destroy(&r->slab);
    free(r);
}

/* ---- regions.c ---- */

#define AREA 4000
#define PLACES 100 /* of so many bytes each: regions never overlap */

static void regions(uint64_t steps)
{
    static char memory[PLACES * AREA];
    static struct region known[PLACES];
    uint64_t last = 0, dropped = 0;
    uint32_t n = 0;
    for (check_step = 1; check_step <= steps; check_step++) {
        uint32_t i = draw(PLACES), j = draw(PLACES);
        struct region found;
        if (!known[i].id) {
            size_t from = draw(AREA / 2), len = 1 + draw(AREA / 2);
            known[i] = (struct region){memory + i * AREA + from, len, 0};
            known[i].id = azc_region_add(known[i].base, len);
            CHECK(known[i].id > last); /* never used again */
            last = known[i].id;
            n++;
        } else if (draw(2)) {
            uint64_t before = regions_epoch();
            CHECK(azc_region_drop(known[i].id) == 0 && regions_epoch() != before);
            CHECK(azc_region_drop(known[i].id) == -ENOENT && !region_by_id(known[i].id, &found));
            known[i].id = 0;
            dropped++;
            n--;
        }
        CHECK(regions_any() == (n > 0));
        if (known[j].id)
            CHECK(region_by_id(known[j].id, &found) && found.base == known[j].base);
        /* Any piece of the area: found if it lies in a region from end to end. */
        size_t at = j * AREA + draw(AREA), len = draw(AREA / 2);
        if (known[j].id && draw(2)) { /* at its edges */
            at = (size_t)(known[j].base - memory) + draw(2);
            len = known[j].len - draw(2);
        }
        if (at + len > sizeof memory)
            continue;
        struct region *in =
            known[j].id && region_holds(&known[j], memory + at, len) ? &known[j] : 0;
        CHECK(region_find(memory + at, len, &found) == (in != NULL) && (!in || found.id == in->id));
        struct iovec iov[3] = {{memory + at, len},
                               {(void *)known[j].base, known[j].len / 2},
                               {(void *)known[i].base, known[i].len}};
        uint32_t prefix = regions_prefix(iov, 3, &found);
        CHECK(prefix == (!in ? 0u : i == j ? 3u : 2u));
    }
    CHECK(dropped > steps / 10);
    for (uint32_t i = 0; i < PLACES; i++)
        if (known[i].id)
            CHECK(azc_region_drop(known[i].id) == 0);
    static char many[AZC_REGIONS_MAX + 1];
    uint64_t ids[AZC_REGIONS_MAX];
    for (int i = 0; i < AZC_REGIONS_MAX; i++)
        CHECK((ids[i] = azc_region_add(many + i, 1)));
    CHECK(!azc_region_add(many + AZC_REGIONS_MAX, 1)); /* there are too many */
    for (int i = 0; i < AZC_REGIONS_MAX; i++)
        CHECK(azc_region_drop(ids[i]) == 0);
    CHECK(!regions_any());
}

int main(int argc, char **argv)
{
    uint64_t steps = check_args(argc, argv, 100000);
    slots_and_their_tokens(steps);
    copied_bytes(steps / 4);
    regions(steps);
    if (steps >= 100000) /* 17 million uses of one slot */
        generations_come_round();
    return 0;
}
