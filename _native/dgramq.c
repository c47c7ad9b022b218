/* dgramq.c - one socket's queue of datagrams. Knows no backend.
 *
 * Owns: copies of datagrams that were not sent yet. Used by: reactor.c (push), the backends
 * (flush). Many datagrams go in one sendmmsg: in call order, with an error told for the very one
 * that met it, on either backend. (Requests in a ring would be reordered by a full socket, which a
 * Unix datagram socket must never show.) A full socket keeps the rest, in order, until it is
 * writable.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <string.h>

#define BATCH 64

int dgramq_push(struct conn *c, const char *p, size_t n, const char *name, size_t namelen)
{
    if (namelen > AZC_NAME_MAX)
        return -EINVAL;
    struct chunk *k = chunk_new(c->r, sizeof(struct dgram) + n);
    if (!k)
        return -ENOMEM;
    struct dgram *d = (struct dgram *)k->data;
    d->chunk = k;
    d->next = NULL;
    d->len = n;
    d->namelen = (uint32_t)namelen;
    if (namelen)
        memcpy(d->name, name, namelen);
    if (n)
        memcpy(d->data, p, n);
    if (c->dq.tail)
        c->dq.tail->next = d;
    else
        c->dq.head = d;
    c->dq.tail = d;
    c->dq.count++;
    sendq_queued(c, n);
    return 0;
}

static void pop(struct conn *c)
{
    struct dgram *d = c->dq.head;
    c->dq.head = d->next;
    if (!d->next)
        c->dq.tail = NULL;
    c->dq.count--;
    sendq_unqueued(c, d->len);
    c->pub.sent_pos += d->len;
    chunk_free(c->r, d->chunk);
}

void dgramq_drop(struct conn *c)
{
    while (c->dq.head)
        pop(c);
}

/* Send what is queued until the socket is full. */
void dgramq_flush(struct conn *c)
{
    struct mmsghdr m[BATCH];
    struct iovec iov[BATCH];
    while (c->dq.head && !c->want_out) {
        unsigned n = 0;
        memset(m, 0, sizeof m);
        for (struct dgram *d = c->dq.head; d && n < BATCH; d = d->next, n++) {
            iov[n] = (struct iovec){d->data, d->len};
            m[n].msg_hdr.msg_iov = &iov[n];
            m[n].msg_hdr.msg_iovlen = 1;
            m[n].msg_hdr.msg_name = d->namelen ? d->name : NULL;
            m[n].msg_hdr.msg_namelen = d->namelen;
        }
        int sent = sendmmsg(c->pub.fd, m, n, MSG_DONTWAIT | MSG_NOSIGNAL);
        c->r->stats.requests++;
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0 && errno == EAGAIN) {
            c->want_out = true;
        } else if (sent < 0) {
            emit(c->r, c->pub.token, AZC_EV_DATAGRAM, -errno, 0);
            pop(c);
        }
        for (int i = 0; i < sent; i++)
            pop(c);
        c->r->stats.parts += sent > 0 ? (unsigned)sent : 0;
    }
    conn_notify(c);
}
