/* test_model.c - send queue and operation table under random operations, against a plain model.
 *
 * Compiled and run by tests/test_native.py and `make native`; arguments: [steps [seed]]. No kernel:
 * the test takes the requests and answers them in any way a kernel may, with full and short
 * results, every kind of error, notifications in any order, early, doubled. It plays the kernel's
 * reading, too: the bytes of a request are read when they are accepted, and again right before its
 * notification, out of the very memory that was named; memory that an operation gave back is freed
 * at once. So bytes out of order, and memory that is freed, reused or extended early, show as wrong
 * bytes or to the sanitizers.
 *
 * The model knows what is queued on each connection, which requests there are, and who is told
 * what; it is compared with the accounts of the library after each step.
 */
#include "internal.h"

#include "check.h"

#include <errno.h>
#include <string.h>

#define CONNS 3
#define PARTS 512
#define REQS 256
#define OPS 2048

struct mop { /* an operation of the model */
    enum op_kind kind;
    azc_op *op;
    uint64_t token, nbytes, sent;
    uint32_t id, parts, pins;
    int error;
    bool used, issued, withdrawn, told;
    char *memory; /* of its parts, one behind the other; a chunk has its own */
};

struct mpart {
    struct mop *op;
    size_t at, len; /* at: in the bytes of its operation */
};

struct mreq {
    struct req *q;
    uint64_t token;
    int conn;
    struct iovec *iov;
    unsigned char *bytes; /* what they held when it was issued */
    uint32_t n;
    uint64_t size, accepted;
    struct mop *ops[PARTS];
    uint32_t n_ops;
    bool zc, first, notif, used;
};

struct mconn {
    struct conn *c;
    struct mpart parts[PARTS];
    uint32_t n_parts;
    struct mreq *unsent;
    uint32_t in_request; /* parts that it reads */
    int error;
    uint64_t sent_pos, copy_left; /* copy_left: what fell back */
    bool held;
};

static azc_reactor *r;
static struct mconn conns[CONNS];
static struct mop ops[OPS];
static struct mreq reqs[REQS];
static uint32_t last_id;
static uint64_t counts[16];

static unsigned char value(uint32_t id, size_t i)
{
    return (unsigned char)(id * 131 + i * 7 + (i >> 8));
}

static void open_conn(struct mconn *m)
{
    azc_conn *pub = azc_conn_open(r, -1, AZC_STREAM, 0);
    CHECK(pub);
    memset(m, 0, sizeof *m);
    m->c = (struct conn *)((char *)pub - offsetof(struct conn, pub));
    pub->zc_ok = draw(8) != 0;
    pub->zc_threshold = draw(2) ? 0 : 3000;
    pub->zc_cap = draw(4) ? UINT64_MAX / 4 : 20000;
    pub->adaptive = draw(2);
    m->c->want_recv = draw(4) != 0;
}

static struct mop *new_op(enum op_kind kind, uint64_t nbytes)
{
    for (uint32_t i = 0; i < OPS; i++) {
        if (ops[i].used)
            continue;
        ops[i] = (struct mop){.kind = kind, .nbytes = nbytes, .used = true, .id = ++last_id};
        ops[i].memory = malloc(nbytes);
        CHECK(ops[i].memory);
        for (size_t k = 0; k < nbytes; k++)
            ops[i].memory[k] = (char)value(ops[i].id, k);
        return &ops[i];
    }
    return NULL;
}

/* It may be read no more: whoever still does will be seen. */
static void end_op(struct mop *o)
{
    free(o->memory);
    o->used = false;
}

static void add_part(struct mconn *m, struct mop *o, size_t at, size_t len)
{
    if (!len)
        return;
    m->parts[m->n_parts++] = (struct mpart){o, at, len};
    o->parts++;
}

/* ---- what the caller does ---- */

static size_t some_size(void)
{
    static const size_t edges[] = {1, 2, 511, 1023, 1024, 4095, 4096, 16384};
    return draw(4) ? 1 + draw(3000) : edges[draw(8)];
}

static void submit(struct mconn *m)
{
    azc_iov iov[6];
    size_t n = 1 + draw(6), total = 0, sizes[6];
    for (size_t i = 0; i < n; i++)
        total += sizes[i] = i && !draw(8) ? 0 : some_size();
    struct mop *o = new_op(OP_USER, total);
    if (!o)
        return;
    for (size_t i = 0, at = 0; i < n; at += sizes[i++]) {
        iov[i] = (azc_iov){o->memory + at, sizes[i]};
        add_part(m, o, at, sizes[i]);
    }
    o->op = n == 1 ? azc_submit_one(&m->c->pub, o->memory, total) : azc_submit(&m->c->pub, iov, n);
    CHECK(o->op);
    o->token = o->op->token;
    o->op->want_sent = draw(2);
}

static void reference(struct mconn *m)
{
    size_t n = some_size();
    struct mop *o = new_op(draw(2) ? OP_REF : OP_AUTO, n);
    if (!o)
        return;
    o->op = op_new(r, o->kind, n);
    CHECK(o->op && sendq_push(m->c, o->memory, n, o->op) == 0);
    o->token = o->op->token;
    mark_dirty(m->c);
    add_part(m, o, 0, n);
}

/* A copied write: the library merges some of them, so the model asks which chunk has it. */
static void copy(struct mconn *m)
{
    size_t n = draw(3) ? 1 + draw(200) : some_size();
    uint32_t before = m->c->q.count;
    struct mop *o = NULL;
    char *source;
    struct mpart *tail = m->n_parts ? &m->parts[m->n_parts - 1] : NULL;
    struct part *real = before ? sendq_at(&m->c->q, before - 1) : NULL;
    size_t used = real && real->op->kind == OP_CHUNK ? ((struct chunk *)real->op)->used : 0;
    bool merges = used && tail->op->kind == OP_CHUNK && before > m->c->q.in_request &&
                  ((struct chunk *)real->op)->cap - used >= n;
    if (merges) {
        o = tail->op;
        source = malloc(n);
        CHECK(source);
        for (size_t i = 0; i < n; i++)
            source[i] = (char)value(o->id, o->nbytes + i);
    } else {
        o = new_op(OP_CHUNK, n);
        if (!o)
            return;
        source = o->memory;
        o->memory = NULL;
    }
    CHECK(sendq_copy(m->c, source, n) == 0);
    mark_dirty(m->c);
    free(source); /* asyncio's promise: write() has it */
    CHECK(m->c->q.count == before + !merges);
    if (merges) {
        o->nbytes += n;
        tail->len += n;
    } else {
        o->op = sendq_at(&m->c->q, before)->op;
        add_part(m, o, 0, n);
    }
}

static void withdraw(struct mconn *m)
{
    if (!m->n_parts)
        return;
    struct mop *o = m->parts[draw(m->n_parts)].op;
    if (o->kind == OP_CHUNK)
        return; /* nobody outside has it */
    bool may = o->kind == OP_USER && !o->issued;
    CHECK(azc_withdraw(&m->c->pub, o->op) == may);
    if (!may)
        return;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < m->n_parts; i++)
        if (m->parts[i].op != o)
            m->parts[kept++] = m->parts[i];
    m->n_parts = kept;
    end_op(o);
}

/* Sending is over: what no request reads is dropped, what was queued has failed. */
static void fail(struct mconn *m, int error)
{
    if (!m->error)
        m->error = error;
    m->copy_left = 0;
    for (uint32_t i = 0; i < m->n_parts; i++)
        m->parts[i].op->error = m->error;
    while (m->n_parts > m->in_request)
        m->parts[--m->n_parts].op->parts--;
}

/* ---- what the kernel does ---- */

static struct mreq *new_req(void)
{
    for (uint32_t i = 0; i < REQS; i++)
        if (!reqs[i].used)
            return &reqs[i];
    return NULL;
}

static void issue(struct mconn *m, int number)
{
    struct gathered g;
    struct mreq *k = new_req();
    CHECK(sendq_ready(m->c) == (m->n_parts && !m->unsent && !m->error && !m->held));
    if (!k || !sendq_ready(m->c))
        return;
    bool copying = m->copy_left > 0;
    CHECK(sendq_gather(m->c, &g) == 0);
    CHECK(g.parts && g.parts <= r->cfg.max_parts && g.bytes <= r->cfg.max_request);
    CHECK(!(g.zc && (copying || !m->c->pub.zc_ok)));
    memset(k, 0, sizeof *k);
    k->iov = malloc(g.parts * sizeof *k->iov);
    k->bytes = malloc(g.bytes);
    CHECK(k->iov && k->bytes);
    k->n = g.parts;
    k->zc = g.zc;
    k->conn = number;
    k->used = true;
    bool pays = false;
    for (uint32_t i = 0; i < g.parts; i++) {
        struct mpart *p = &m->parts[i];
        size_t len = m->c->q.iov[i].iov_len;
        CHECK(len == p->len || (i == g.parts - 1 && len < p->len));
        k->iov[i] = m->c->q.iov[i];
        for (size_t b = 0; b < len; b++) {
            k->bytes[k->size] = value(p->op->id, p->at + b);
            CHECK(((unsigned char *)k->iov[i].iov_base)[b] == k->bytes[k->size++]);
        }
        pays |= p->op->kind == OP_USER || p->op->kind == OP_AUTO;
        p->op->issued = true;
        if (!k->n_ops || k->ops[k->n_ops - 1] != p->op)
            k->ops[k->n_ops++] = p->op;
    }
    CHECK(k->size == g.bytes && (!g.zc || pays));
    k->q = req_new(m->c, &g);
    CHECK(k->q);
    k->token = k->q->slot.token;
    for (uint32_t i = 0; i < k->n_ops; i++)
        k->ops[i]->pins++;
    m->unsent = k;
    m->in_request = g.parts;
    counts[g.zc]++;
}

/* As late as it may: the memory that the request names still holds its bytes. */
static void read_memory(struct mreq *k, uint64_t n)
{
    uint64_t at = 0;
    for (uint32_t i = 0; i < k->n && at < n; i++)
        for (size_t b = 0; b < k->iov[i].iov_len && at < n; b++)
            CHECK(((unsigned char *)k->iov[i].iov_base)[b] == k->bytes[at++]);
}

static void finish(struct mreq *k)
{
    for (uint32_t i = 0; i < k->n_ops; i++)
        k->ops[i]->pins--;
    free(k->iov);
    free(k->bytes);
    k->used = false;
}

static void first(struct mconn *m)
{
    static const int errors[] = {EAGAIN,     EINTR, ECANCELED,  ENOMEM,    ENOBUFS,
                                 EOPNOTSUPP, EPIPE, ECONNRESET, ECANCELED, ENOMEM};
    struct mreq *k = m->unsent;
    uint32_t how = draw(10);
    int32_t res = (int32_t)k->size;
    if (how < 2)
        res = (int32_t)draw((uint32_t)k->size + 1);
    else if (how < 4)
        res = -errors[draw(draw(20) ? 6 : 10)];
    /* Without a notification only where nothing was sent, or nothing pinned. An error that means
     * that zero-copy failed may have one. */
    bool more = k->zc && (res > 0 || draw(2)) && !(k->notif && draw(2));
    uint64_t n = res > 0 ? (uint64_t)res : 0;
    read_memory(k, n);
    k->first = true;
    k->accepted = n;
    m->unsent = NULL;
    m->in_request = 0;
    m->sent_pos += n;
    m->copy_left -= m->copy_left < n ? m->copy_left : n;
    bool falls_back = k->zc && (res == -ENOMEM || res == -ENOBUFS || res == -EOPNOTSUPP);
    for (uint64_t left = n; left;) {
        struct mpart *p = &m->parts[0];
        size_t take = p->len < left ? p->len : left;
        p->op->sent += take;
        p->at += take;
        p->len -= take;
        left -= take;
        if (!p->len) {
            p->op->parts--;
            memmove(m->parts, m->parts + 1, --m->n_parts * sizeof *m->parts);
        }
    }
    if (falls_back && res != -EOPNOTSUPP)
        m->copy_left = k->size;
    if (res < 0 && !falls_back && res != -EAGAIN && res != -EINTR && res != -ECANCELED)
        fail(m, res);
    if (m->error)
        fail(m, m->error);
    bool over = !(more && k->zc && !k->notif);
    struct req *q = k->q;
    if (over)
        finish(k);
    if (res == -ECANCELED && !more && draw(2))
        req_drop(q);
    else
        req_first(q, res, more);
    counts[2 + (res < 0)]++;
}

static void notify(struct mreq *k)
{
    struct req *q = table_get(&r->reqs, k->token);
    CHECK(q == k->q);
    if (!k->first || k->accepted)
        read_memory(k, k->first ? k->accepted : k->size);
    bool known = k->first;
    k->notif = true;
    if (known)
        finish(k);
    req_notif(q, draw(8) != 0, draw(2));
    if (known)
        CHECK(!table_get(&r->reqs, k->token)); /* a second one finds nobody */
    counts[4 + !known]++;
}

static void some_notif(void)
{
    uint32_t at = draw(REQS);
    for (uint32_t i = 0; i < REQS; i++) {
        struct mreq *k = &reqs[(at + i) % REQS];
        if (k->used && k->zc && !k->notif && (k->first || !draw(16))) {
            notify(k);
            return;
        }
    }
}

/* ---- what is told ---- */

static struct mop *op_by(uint64_t token)
{
    for (uint32_t i = 0; i < OPS; i++)
        if (ops[i].used && ops[i].kind != OP_CHUNK && ops[i].token == token)
            return &ops[i];
    return NULL;
}

static void free_chunks(void)
{
    for (uint32_t i = 0; i < OPS; i++)
        if (ops[i].used && ops[i].kind == OP_CHUNK && !ops[i].parts && !ops[i].pins)
            end_op(&ops[i]);
}

static void hear(void)
{
    int fired = azc_take_events(r);
    for (int i = 0; i < (fired & AZC_FIRED_EVENTS); i++) {
        azc_event *e = &azc_events(r)[i];
        struct mop *o =
            e->kind == AZC_EV_SENT || e->kind == AZC_EV_RELEASED ? op_by(e->token) : NULL;
        if (e->kind == AZC_EV_SENT) {
            CHECK(o && !o->parts && !o->told && e->res == o->error);
            o->told = true;
        } else if (e->kind == AZC_EV_RELEASED) {
            CHECK(o && o->kind == OP_USER && !o->parts && !o->pins && e->res == o->error);
            CHECK(o->error || o->sent == o->nbytes);
            CHECK(o->op->state == (o->error ? AZC_FAILED : AZC_RELEASED));
            counts[6 + (o->error != 0)]++;
            end_op(o);
        } else {
            CHECK(e->kind == AZC_EV_WRITE);
        }
    }
    uint64_t tokens[64];
    size_t n;
    CHECK(!(fired & AZC_FIRED_RELEASED) == !r->n_rel);
    while ((n = azc_take_released(r, tokens, 64)))
        while (n--) {
            struct mop *o = op_by(tokens[n]);
            CHECK(o && (o->kind == OP_REF || o->kind == OP_AUTO) && !o->parts && !o->pins);
            counts[8]++;
            end_op(o);
        }
    /* Nobody that could be told was forgotten. */
    for (uint32_t i = 0; i < OPS; i++)
        CHECK(!ops[i].used || ops[i].parts || ops[i].pins || r->n_pending);
}

static void compare(void)
{
    uint64_t unsent = 0, pinned = 0, owed = 0, live = 0;
    for (int i = 0; i < CONNS; i++) {
        struct mconn *m = &conns[i];
        struct sendq *q = &m->c->q;
        uint64_t bytes = 0, mine = 0;
        uint32_t zc = 0, autos = 0;
        CHECK(q->count == m->n_parts && q->in_request == m->in_request);
        CHECK(q->copy_left == m->copy_left);
        for (uint32_t p = 0; p < m->n_parts; p++) {
            CHECK(sendq_at(q, p)->len == m->parts[p].len);
            CHECK(sendq_at(q, p)->op == m->parts[p].op->op);
            bytes += m->parts[p].len;
            zc += m->parts[p].op->kind == OP_USER;
            autos += m->parts[p].op->kind == OP_AUTO;
        }
        for (uint32_t k = 0; k < REQS; k++)
            if (reqs[k].used && reqs[k].zc && reqs[k].q->conn == m->c)
                mine += reqs[k].first ? reqs[k].accepted : reqs[k].size;
        CHECK(m->c->pub.unsent == bytes && q->zc_parts == zc && q->auto_parts == autos);
        CHECK(m->c->pub.pinned == mine && m->c->pub.sent_pos == m->sent_pos);
        CHECK(m->c->pub.error == m->error && !m->c->rq == !m->unsent);
        CHECK(azc_conn_outstanding(&m->c->pub) ==
              bytes + mine - (m->unsent && m->unsent->zc ? m->unsent->size : 0));
        unsent += bytes;
    }
    uint32_t n = 0;
    for (uint32_t k = 0; k < REQS; k++) {
        n += reqs[k].used;
        owed += reqs[k].used && reqs[k].first;
        if (reqs[k].used && reqs[k].zc)
            pinned += reqs[k].first ? reqs[k].accepted : reqs[k].size;
    }
    for (uint32_t i = 0; i < OPS; i++) {
        struct mop *o = &ops[i];
        if (!o->used)
            continue;
        live += o->kind == OP_USER && (o->parts || o->pins);
        if (!o->parts && !o->pins)
            continue; /* a chunk's place may be somebody else's already */
        CHECK(o->op->parts == o->parts && o->op->pins == o->pins);
        CHECK(o->op->sent == o->sent && o->op->error == o->error);
        CHECK(o->op->state == (o->parts   ? o->issued ? AZC_ISSUED : AZC_QUEUED
                               : o->error ? AZC_FAILED
                                          : AZC_SENT));
    }
    CHECK(r->reqs.live == n && r->stats.notifications_outstanding == owed);
    CHECK(r->stats.queued_bytes == unsent && r->stats.pinned_bytes == pinned);
    CHECK(r->stats.operations_live == live);
}

/* ---- ends ---- */

static void answer(struct mconn *m)
{
    if (m->unsent)
        first(m);
}

static void abort_conn(struct mconn *m)
{
    azc_conn_abort(&m->c->pub, -ECONNABORTED);
    fail(m, -ECONNABORTED);
}

/* Its requests are answered or dropped by then; notifications may be owed for long. */
static void close_conn(struct mconn *m)
{
    answer(m);
    bool owed = false;
    for (uint32_t k = 0; k < REQS; k++)
        owed |= reqs[k].used && reqs[k].q->conn == m->c;
    fail(m, -ECONNABORTED);
    CHECK(azc_conn_close(&m->c->pub, -ECONNABORTED) == 0); /* no descriptor that could be kept */
    counts[9 + owed]++;
    open_conn(m);
}

/* What azc_wait's backend does with the list of those that changed. */
static void flush(void)
{
    struct conn *c = r->dirty, *next;
    r->dirty = NULL;
    for (; c; c = next) {
        next = c->dirty_next;
        c->dirty = false;
        if (c->closed)
            conn_maybe_free(c);
    }
}

static void step(void)
{
    int number = (int)draw(CONNS);
    struct mconn *m = &conns[number];
    uint32_t room = PARTS - m->n_parts, how = draw(100);
    if (m->error && !draw(10))
        close_conn(m);
    else if (how < 12 && room > 8 && !m->error)
        submit(m);
    else if (how < 20 && room > 8 && !m->error)
        reference(m);
    else if (how < 32 && room > 8 && !m->error)
        copy(m);
    else if (how < 56)
        issue(m, number);
    else if (how < 78)
        answer(m);
    else if (how < 92)
        some_notif();
    else if (how < 95)
        withdraw(m);
    else if (how < 96)
        azc_conn_hold(&m->c->pub, m->held = !m->held);
    else if (how < 97)
        azc_conn_notify(&m->c->pub, 1 + draw(15));
    else if (how < 98)
        azc_conn_hold(&m->c->pub, m->held = false);
    else if (how < 99 && !draw(4))
        abort_conn(m);
    else if (!draw(4) || m->error)
        close_conn(m);
    if (!draw(3))
        flush();
    free_chunks();
    if (!draw(2))
        hear();
}

int main(int argc, char **argv)
{
    uint64_t steps = check_args(argc, argv, 100000);
    int err;
    azc_config cfg = {.backend = AZC_EPOLL,
                      .zerocopy = 1,
                      .max_request = 16384,
                      .max_parts = 24,
                      .zc_eor_bytes = 64 << 10,
                      .zc_transport_cap = UINT64_MAX / 4,
                      .zc_loop_cap = 200000};
    r = azc_open(&cfg, &err);
    CHECK(r);
    for (int i = 0; i < CONNS; i++)
        open_conn(&conns[i]);
    for (check_step = 1; check_step <= steps; check_step++) {
        step();
        compare();
    }
    for (int i = 0; i < CONNS; i++)
        close_conn(&conns[i]);
    for (uint32_t k = 0; k < REQS; k++)
        if (reqs[k].used)
            notify(&reqs[k]);
    flush();
    free_chunks();
    while (hear(), r->n_pending)
        ;
    for (uint32_t i = 0; i < OPS; i++)
        CHECK(!ops[i].used);
    compare();
    CHECK(azc_close(r) == 0);
    static const char *const what[] = {
        "copied",   "zero-copy", "accepted",   "refused", "notifications", "before the first",
        "released", "failed",    "references", "closed",  "closed pinned"};
    for (size_t i = 0; i < sizeof what / sizeof *what; i++) {
        CHECK(counts[i] || steps < 50000); /* all of it was met */
        printf("%s %llu  ", what[i], (unsigned long long)counts[i]);
    }
    puts("");
    return 0;
}
