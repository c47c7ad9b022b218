/* dgramq.c - one socket's queue of datagrams. Knows no backend.
 *
 * Owns: datagrams that were not sent yet: copies of them (azc_sendto), or what describes the
 * caller's memory (azc_zc_sendto). Used by: write.c (push, submit), the backends (flush),
 * optable.c (answers). One FIFO for both: datagrams leave in call order, each with its own error,
 * on either backend.
 *
 * What goes by copying leaves in one sendmmsg, in order. (Requests in a ring would be reordered by
 * a full socket, which a Unix datagram socket must never show.) What goes zero-copy, one request
 * each, is asked of the ring by uring_submit.c; nothing of the socket is sent meanwhile, and no
 * more is asked for than its send buffer surely takes. A full socket keeps the rest, in order,
 * until it is writable.
 *
 * Never: blame an operation for an error that was pending before it was sent (see refused()).
 */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/ioctl.h>

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif
#ifndef SOL_UDP
#define SOL_UDP 17
#endif

#define BATCH 64
/* So often a datagram is sent anew where the error may be another one's. */
#define TRIES 16
/* Fragments of one datagram's memory that every kernel takes (MAX_SKB_FRAGS, at least 17); one that
 * touches more pages would be refused with EMSGSIZE. */
#define ZC_PAGES 17u
#define PAGE 4096u
/* What the kernel charges a socket for one datagram's header, at most. */
#define HEADER_CHARGE 2048

static struct dgram *dgram_new(struct conn *c, size_t len, const char *name, size_t namelen,
                               size_t room)
{
    if (namelen > AZC_NAME_MAX)
        return NULL;
    struct chunk *k = chunk_new(c->r, sizeof(struct dgram) + room);
    if (!k)
        return NULL;
    struct dgram *d = (struct dgram *)k->data;
    d->chunk = k;
    d->next = NULL;
    d->len = len;
    d->op = NULL;
    d->namelen = (uint32_t)namelen;
    if (namelen)
        memcpy(d->name, name, namelen);
    return d;
}

static void append(struct conn *c, struct dgram *d)
{
    if (c->dq.tail)
        c->dq.tail->next = d;
    else
        c->dq.head = d;
    c->dq.tail = d;
    c->dq.count++;
    sendq_queued(c, d->len);
}

int dgramq_push(struct conn *c, const char *p, size_t n, const char *name, size_t namelen)
{
    struct dgram *d = dgram_new(c, n, name, namelen, n);
    if (!d)
        return -ENOMEM;
    if (n)
        memcpy(d->data, p, n);
    append(c, d);
    return 0;
}

static void ask_segments(struct msghdr *m, char *control, uint16_t segment)
{
    m->msg_control = control;
    m->msg_controllen = CMSG_SPACE(sizeof segment);
    struct cmsghdr *cm = CMSG_FIRSTHDR(m);
    cm->cmsg_level = SOL_UDP;
    cm->cmsg_type = UDP_SEGMENT;
    cm->cmsg_len = CMSG_LEN(sizeof segment);
    memcpy(CMSG_DATA(cm), &segment, sizeof segment);
}

azc_op *dgramq_submit(struct conn *c, const azc_iov *parts, size_t n, const char *name,
                      size_t namelen, uint16_t segment)
{
    size_t total = 0;
    for (size_t i = 0; i < n; i++)
        total += parts[i].len;
    struct dgram *d =
        dgram_new(c, total, name, namelen, sizeof(struct zdgram) + n * sizeof(struct iovec));
    if (!d)
        return NULL;
    d->op = op_new(c->r, OP_USER, total);
    if (!d->op) {
        chunk_free(c->r, d->chunk);
        return NULL;
    }
    struct zdgram *z = zdgram_of(d);
    memset(z, 0, sizeof *z);
    size_t used = 0;
    for (size_t i = 0; i < n; i++) {
        if (!parts[i].len)
            continue;
        z->iov[used++] = (struct iovec){(void *)parts[i].base, parts[i].len};
        z->pages += (uint32_t)(((uintptr_t)parts[i].base % PAGE + parts[i].len + PAGE - 1) / PAGE);
    }
    z->msg.msg_iov = z->iov;
    z->msg.msg_iovlen = used;
    z->msg.msg_name = namelen ? d->name : NULL;
    z->msg.msg_namelen = (socklen_t)namelen;
    if (segment && total > segment)
        ask_segments(&z->msg, z->control, segment);
    d->op->parts = 1;
    append(c, d);
    return d->op;
}

/* Out of the queue; nothing of it is with the kernel. */
static void unlink_dgram(struct conn *c, struct dgram *d)
{
    struct dgram **at = &c->dq.head, *before = NULL;
    while (*at != d) {
        before = *at;
        at = &before->next;
    }
    *at = d->next;
    if (c->dq.tail == d)
        c->dq.tail = before;
    c->dq.count--;
    sendq_unqueued(c, d->len);
}

/* It was sent, or (`error`) never will be. */
static void done(struct conn *c, struct dgram *d, int error)
{
    azc_op *op = d->op;
    unlink_dgram(c, d);
    c->pub.sent_pos += d->len;
    if (op) {
        op->error = error;
        op->sent = error ? 0 : d->len;
        op->parts = 0;
    }
    chunk_free(c->r, d->chunk);
    if (op)
        op_check(c->r, op);
}

/* Those that the kernel is reading end with their first completion. */
void dgramq_drop(struct conn *c, int error)
{
    for (struct dgram *d = c->dq.head, *next; d; d = next) {
        next = d->next;
        if (!d->op || !zdgram_of(d)->issued)
            done(c, d, error);
    }
}

/* Take an operation out that the kernel was never given. */
bool dgramq_remove(struct conn *c, azc_op *op)
{
    if (op->state != AZC_QUEUED || op->pins)
        return false;
    struct dgram *d = c->dq.head;
    while (d && d->op != op)
        d = d->next;
    if (!d)
        return false;
    unlink_dgram(c, d);
    c->pub.queued_pos -= d->len;
    c->r->stats.bytes -= d->len;
    op->parts = 0;
    chunk_free(c->r, d->chunk);
    return true;
}

/* Does it go zero-copy? Decided once, when its turn comes. */
bool dgramq_goes_zc(struct conn *c, struct dgram *d)
{
    if (!d->op)
        return false;
    struct zdgram *z = zdgram_of(d);
    if (z->way == WAY_OPEN) {
        z->way = WAY_COPY;
        struct gathered g = {.parts = (uint32_t)z->msg.msg_iovlen, .bytes = d->len};
        if (z->pages <= ZC_PAGES && zc_allowed(c, d->len, &g)) {
            if (fault(c->r, AZC_FAULT_ZC_ENOMEM))
                c->r->stats.fallbacks[AZC_FALLBACK_ENOMEM]++;
            else if (fault(c->r, AZC_FAULT_ZC_ENOBUFS))
                c->r->stats.fallbacks[AZC_FALLBACK_ENOBUFS]++;
            else
                z->way = WAY_ZC;
        }
    }
    return z->way == WAY_ZC && c->pub.zc_ok;
}

/* Bytes that the socket's send buffer still takes. */
static int64_t room(const struct conn *c)
{
    int size = 0, used = 0;
    socklen_t n = sizeof size;
    if (getsockopt(c->pub.fd, SOL_SOCKET, SO_SNDBUF, &size, &n) < 0 ||
        ioctl(c->pub.fd, SIOCOUTQ, &used) < 0)
        return 0;
    return (int64_t)size - used;
}

/* May one more zero-copy datagram be tried in this turn? The first one always is: its answer says
 * when to wait. The others, while the send buffer surely takes them (`share`: or that part of it);
 * each takes whole pages at most. */
bool dgramq_fits(struct conn *c, struct dgram *d, struct dgram_turn *t, int share)
{
    if (t->n == 1)
        t->room = room(c) / share;
    if (t->n && t->taken >= t->room)
        return false;
    t->n++;
    t->taken += (int64_t)zdgram_of(d)->pages * PAGE + HEADER_CHARGE;
    return true;
}

/* An error that the network may have reported for an earlier datagram: the kernel tells it once, by
 * whatever is called next, and does not send then. */
static bool may_be_anothers(const struct conn *c, int error)
{
    int domain = AF_UNSPEC; /* a Unix socket's errors are those of the call */
    socklen_t n = sizeof domain;
    (void)getsockopt(c->pub.fd, SOL_SOCKET, SO_DOMAIN, &domain, &n);
    if (domain != AF_INET && domain != AF_INET6)
        return false;
    switch (-error) {
    case ECONNREFUSED:
    case EHOSTUNREACH:
    case ENETUNREACH:
    case EHOSTDOWN:
    case ENONET:
    case ENOPROTOOPT:
    case EOPNOTSUPP:
    case EPROTO:
    case EACCES:
    case EMSGSIZE:
        return true;
    default:
        return false;
    }
}

static void tell(struct conn *c, int error)
{
    emit(c->r, c->pub.token, AZC_EV_DATAGRAM, error, 0);
}

/* The kernel refused to send it. A copied datagram: told to error_received, as asyncio does. An
 * operation is tried again where the error may be an earlier datagram's: by itself, with what is
 * pending read before. What it meets every time is its own. (Once would do, but that the next ICMP
 * message may come in between: where many datagrams in a row are refused, it does.) */
static void refused(struct conn *c, struct dgram *d, int error)
{
    if (!d->op) {
        tell(c, error);
        done(c, d, error);
        return;
    }
    struct zdgram *z = zdgram_of(d);
    z->way = WAY_COPY;
    if (z->suspect && z->suspect != error)
        tell(c, z->suspect);
    z->suspect = error;
    if (!may_be_anothers(c, error) || z->tries++ == TRIES)
        done(c, d, error);
}

/* The first completion of a request for a zero-copy datagram. */
void dgramq_answered(struct conn *c, struct dgram *d, int32_t res)
{
    struct zdgram *z = zdgram_of(d);
    z->issued = false;
    c->dq.issued--;
    d->op->state = AZC_QUEUED;
    int reason = res < 0 ? fallback_reason(-res) : -1;
    if (res >= 0) {
        done(c, d, 0);
    } else if (c->pub.error) {
        done(c, d, c->pub.error);
    } else if (reason >= 0) {
        fell_back(c->r, reason);
        z->way = WAY_COPY;
        if (reason == AZC_FALLBACK_EOPNOTSUPP)
            c->pub.zc_ok = 0;
    } else if (res == -EAGAIN) {
        c->want_out = true;
    } else if (res != -EINTR && res != -ECANCELED) {
        refused(c, d, res);
    }
}

/* What is pending belongs to no datagram that is still queued. */
static void read_pending(struct conn *c)
{
    int error = 0;
    socklen_t n = sizeof error;
    if (getsockopt(c->pub.fd, SOL_SOCKET, SO_ERROR, &error, &n) == 0 && error)
        tell(c, -error);
}

static bool is_suspect(struct dgram *d)
{
    return d->op && zdgram_of(d)->suspect;
}

static int send_batch(struct conn *c, struct mmsghdr *m, unsigned n)
{
    if (c->dq.head->op && fault(c->r, AZC_FAULT_COPY_ENOBUFS))
        return -ENOBUFS;
    if (!c->out_armed && fault(c->r, AZC_FAULT_EAGAIN))
        return -EAGAIN;
    int sent = sendmmsg(c->pub.fd, m, n, MSG_DONTWAIT | MSG_NOSIGNAL);
    c->r->stats.requests++;
    return sent < 0 ? -errno : sent;
}

static void sent_first(struct conn *c)
{
    struct dgram *d = c->dq.head;
    uint64_t parts = 1;
    if (d->op) {
        parts = zdgram_of(d)->msg.msg_iovlen;
        d->op->path |= AZC_PATH_COPIED;
        if (is_suspect(d))
            tell(c, zdgram_of(d)->suspect); /* it was not this one's */
    }
    c->r->stats.parts += parts;
    done(c, d, 0);
}

/* Send what goes by copying, until the socket is full or a datagram goes zero-copy. */
void dgramq_flush(struct conn *c)
{
    struct mmsghdr m[BATCH];
    struct iovec iov[BATCH];
    while (c->dq.head && !c->dq.issued && !c->want_out) {
        unsigned n = 0, max = is_suspect(c->dq.head) ? 1 : BATCH;
        for (struct dgram *d = c->dq.head; d && n < max; d = d->next, n++) {
            if (d->op) {
                if (dgramq_goes_zc(c, d) || (n && is_suspect(d)))
                    break;
                m[n].msg_hdr = zdgram_of(d)->msg;
                continue;
            }
            iov[n] = (struct iovec){d->data, d->len};
            m[n].msg_hdr = (struct msghdr){.msg_iov = &iov[n],
                                           .msg_iovlen = 1,
                                           .msg_name = d->namelen ? d->name : NULL,
                                           .msg_namelen = d->namelen};
        }
        if (!n)
            break;
        if (is_suspect(c->dq.head))
            read_pending(c);
        int sent = send_batch(c, m, n);
        if (sent == -EAGAIN)
            c->want_out = true;
        else if (sent < 0 && sent != -EINTR)
            refused(c, c->dq.head, sent);
        for (int i = 0; i < sent; i++)
            sent_first(c);
    }
    conn_notify(c);
}
