/* The receiving end of a TCP path that never copies: owns what happens to packets at the sink's
 * device.
 *
 * Compiled and attached to that device, both directions, by sink.py; `python -m aiozc bench --path
 * sink` uses it. A receiver made of a socket would copy (and make the sender's kernel copy), so
 * none exists:
 *
 *   SYN, FIN     become their own answers, in place, and go back out of the device
 *   data         loses its ACK flag and goes on to the netfilter ingress hook. There the rule
 * "reject with tcp reset" frees it unread, and makes a reset that acknowledges its bytes: without
 *                the flag a reset's acknowledgement is the sequence number behind the data
 *   that reset   becomes a plain acknowledgement on its way out
 *
 * Never: touches a payload, or changes a packet's length; either would copy it.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>
#include <stddef.h>

/* What libbpf's headers would define; three helpers are not worth a package. */
#define SECTION(name) __attribute__((section(name), used))
static long (*const redirect)(__u32 ifindex, __u64 flags) = (void *)BPF_FUNC_redirect;
static long (*const pull_data)(struct __sk_buff *skb, __u32 len) = (void *)BPF_FUNC_skb_pull_data;

static long (*const replace_sum)(struct __sk_buff *skb, __u32 offset, __u64 from, __u64 to,
                                 __u64 size) = (void *)BPF_FUNC_l4_csum_replace;

#define SWAP16(x) __builtin_bswap16(x)
#define SWAP32(x) __builtin_bswap32(x)

enum {
    FIN = 0x01,
    SYN = 0x02,
    RST = 0x04,
    ACK = 0x10,
    OUR_ISN = 1, /* of the sink: a constant, so that no state is needed */
    WINDOW_SHIFT = 14,
    OPTION_NOP = 1,
    OPTION_MSS = 2,
    OPTION_WINDOW = 3,
};

/* A segment's headers, checked to lie in the linear part. By a flag and not by two pointers of
 * which one is NULL: the verifier loses track of those. */
struct segment {
    struct ethhdr *eth;
    void *ip;
    struct tcphdr *tcp;
    void *end;
    __u32 payload;
    int v4;
};

static __always_inline __u8 *flags_of(struct tcphdr *tcp)
{
    return (__u8 *)tcp + 13;
}

/* False: not a TCP segment of a kind that this path sees. */
static __always_inline int parse(struct __sk_buff *skb, struct segment *s)
{
    __u32 headers = sizeof(struct ethhdr) + sizeof(struct iphdr);
    __u8 *data;

    if (skb->len < headers || pull_data(skb, headers) < 0)
        return 0;
    data = (void *)(long)skb->data;
    if ((void *)(data + headers) > (void *)(long)skb->data_end)
        return 0;
    s->v4 = ((struct ethhdr *)data)->h_proto == SWAP16(ETH_P_IP);
    if (!s->v4 && ((struct ethhdr *)data)->h_proto != SWAP16(ETH_P_IPV6))
        return 0;
    if (!s->v4)
        headers = sizeof(struct ethhdr) + sizeof(struct ipv6hdr);
    if (skb->len < headers + sizeof(struct tcphdr) ||
        pull_data(skb, headers + sizeof(struct tcphdr)) < 0)
        return 0;
    data = (void *)(long)skb->data;
    s->end = (void *)(long)skb->data_end;
    s->eth = (void *)data;
    s->ip = data + sizeof(struct ethhdr);
    s->tcp = (void *)(data + headers);
    if ((void *)(data + headers + sizeof(struct tcphdr)) > s->end)
        return 0;
    s->payload = skb->len - headers - s->tcp->doff * 4;
    if (s->v4) {
        struct iphdr *ip = s->ip;
        return ip->ihl == 5 && ip->protocol == IPPROTO_TCP;
    }
    return ((struct ipv6hdr *)s->ip)->nexthdr == IPPROTO_TCP;
}

/* The same packet the other way round. Sums over the addresses do not change by it, and the TCP
 * checksum is left to whoever looks last: a veth hands it on as "to be filled in". */
static __always_inline void turn_round(struct segment *s)
{
    __u8 mac[ETH_ALEN];
    __be16 port = s->tcp->source;

    __builtin_memcpy(mac, s->eth->h_dest, ETH_ALEN);
    __builtin_memcpy(s->eth->h_dest, s->eth->h_source, ETH_ALEN);
    __builtin_memcpy(s->eth->h_source, mac, ETH_ALEN);
    if (s->v4) {
        struct iphdr *ip = s->ip;
        __be32 address = ip->saddr;
        ip->saddr = ip->daddr;
        ip->daddr = address;
    } else {
        struct ipv6hdr *ip = s->ip;
        struct in6_addr address = ip->saddr;
        ip->saddr = ip->daddr;
        ip->daddr = address;
    }
    s->tcp->source = s->tcp->dest;
    s->tcp->dest = port;
}

/* Our options in the place of the SYN's, and as many bytes of them: MSS, window scale, padding. So
 * neither selective acknowledgements nor timestamps are agreed on. */
static __always_inline int put_options(struct segment *s)
{
    __u32 room = s->tcp->doff * 4 - sizeof(struct tcphdr);
    __u8 *option = (__u8 *)(s->tcp + 1);
    __u16 mss =
        SINK_MTU - sizeof(struct tcphdr) - (s->v4 ? sizeof(struct iphdr) : sizeof(struct ipv6hdr));

    if (room < 8 || (void *)(option + 8) > s->end)
        return 0;
    option[0] = OPTION_MSS;
    option[1] = 4;
    option[2] = mss >> 8;
    option[3] = mss & 255;
    option[4] = OPTION_NOP;
    option[5] = OPTION_WINDOW;
    option[6] = 3;
    option[7] = WINDOW_SHIFT;
    for (int i = 8; i < 40; i++) {
        if (i >= room)
            break;
        if ((void *)(option + i + 1) > s->end)
            return 0;
        option[i] = OPTION_NOP;
    }
    return 1;
}

/* SYN and FIN. */
static __always_inline int answer(struct __sk_buff *skb, struct segment *s, __u8 kind)
{
    __u32 next = SWAP32(s->tcp->seq) + 1;

    if (kind == SYN && !put_options(s))
        return TC_ACT_SHOT;
    turn_round(s);
    s->tcp->seq = SWAP32(kind == SYN ? OUR_ISN : OUR_ISN + 1);
    s->tcp->ack_seq = SWAP32(next);
    s->tcp->window = SWAP16(65535);
    *flags_of(s->tcp) = kind | ACK;
    return redirect(skb->ifindex, 0);
}

SECTION("tc/in") int sink_in(struct __sk_buff *skb)
{
    struct segment s;
    __u8 flags;

    if (!parse(skb, &s) || s.tcp->dest != SWAP16(SINK_PORT))
        return TC_ACT_OK;
    flags = *flags_of(s.tcp);
    if (flags & RST)
        return TC_ACT_SHOT;
    if (flags & SYN) {
        /* The options are not among the headers that were pulled. */
        if (pull_data(skb, skb->len) < 0 || !parse(skb, &s))
            return TC_ACT_SHOT;
        return answer(skb, &s, SYN);
    }
    if (s.payload) { /* with a FIN too: then the sender only gets its data acknowledged */
        *flags_of(s.tcp) = flags & ~ACK;
        return TC_ACT_OK; /* on to netfilter's rule */
    }
    return flags & FIN ? answer(skb, &s, FIN) : TC_ACT_SHOT;
}

SECTION("tc/out") int sink_out(struct __sk_buff *skb)
{
    struct segment s;
    __be32 *words, seq, flags, was_seq, was_flags;
    __u32 check;

    if (!parse(skb, &s) || s.tcp->source != SWAP16(SINK_PORT) || !(*flags_of(s.tcp) & RST))
        return TC_ACT_OK;
    words = (void *)s.tcp;
    was_seq = words[1];
    was_flags = words[3]; /* header length, flags, window */
    seq = SWAP32(OUR_ISN + 1);
    flags = SWAP32(5u << 28 | ACK << 16 | 65535);
    words[1] = seq;
    words[3] = flags;
    check = (void *)&s.tcp->check - (void *)(long)skb->data;
    /* Over IPv6 the reset comes with its sum, over IPv4 with one still to be made: the helper
     * knows. */
    replace_sum(skb, check, was_seq, seq, sizeof(seq));
    replace_sum(skb, check, was_flags, flags, sizeof(flags));
    return TC_ACT_OK;
}

/* The kernel asks for it before it lets a program use the helpers. */
char terms[] SECTION("license") = "Dual MIT/GPL";
