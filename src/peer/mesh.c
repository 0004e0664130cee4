#define _GNU_SOURCE /* accept4, SO_PEERCRED */
#include "peer/mesh.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "base/error.h"

/* What goes before every message. A farewell carries the words in place of data. */
typedef struct header {
    uint64_t round;
    uint64_t bytes;
} header;
static const uint64_t FAREWELL = ~(uint64_t)0;

typedef struct greeting {
    uint64_t secret; /* the listener's */
    int32_t rank;
} greeting;

/* One connection. in_done and out_done count bytes of this round's message, header included. */
typedef struct peer {
    int socket;
    bool gone;
    header in;
    size_t in_done, out_done;
    int fd;          /* came along, -1: none */
} peer;

struct mk_mesh {
    int32_t rank, size;
    int listener;
    uint64_t secret;
    uint64_t round;
    size_t message_bytes;  /* of this round's message, header included */
    bool broken, told;     /* told: by the farewell of a rank */
    char missing[256];     /* why it is broken: the ranks that were not there */
    peer *peers;       /* [size]; own unused */
};

static int64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static int left_of(int64_t deadline)
{
    int64_t left = deadline - now_ms();
    return left < 0 ? 0 : left > 1000000 ? 1000000 : (int)left;
}

/* --- addresses --------------------------------------------------------------------------------------------------------- */
/* FNV-1a of a file's text, 0 if there is none. */
static uint64_t hash_of_file(const char *path)
{
    char text[128];
    uint64_t hash = 1469598103934665603ull;
    FILE *file = fopen(path, "r");
    size_t n = file ? fread(text, 1, sizeof text, file) : 0;
    if (file)
        fclose(file);
    for (size_t i = 0; i < n; i++)
        hash = (hash ^ (unsigned char)text[i]) * 1099511628211ull;
    return n ? hash : 0;
}

static socklen_t socket_address(const char *name, struct sockaddr_un *to)
{
    memset(to, 0, sizeof *to);
    to->sun_family = AF_UNIX;
    size_t n = strlen(name); /* below sizeof mk_address.name */
    memcpy(to->sun_path + 1, name, n); /* a leading 0: the abstract namespace, which leaves no file behind */
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + n);
}

mok_status mk_mesh_listen(int32_t rank, int32_t num_ranks, mk_mesh **mesh, mk_address *address)
{
    struct sockaddr_un name;
    struct stat network;
    uint64_t random[2];
    mk_mesh *m = calloc(1, sizeof *m);
    peer *peers = calloc((size_t)num_ranks, sizeof *peers);
    if (!m || !peers) {
        free(m);
        free(peers);
        return mk_fail(MOK_E_MEMORY, "no memory for connections to %d ranks", num_ranks);
    }
    *m = (mk_mesh){.rank = rank, .size = num_ranks, .listener = -1, .peers = peers};
    for (int32_t r = 0; r < num_ranks; r++)
        peers[r] = (peer){.socket = -1, .fd = -1};
    if (getrandom(random, sizeof random, 0) != sizeof random)
        random[0] = (uint64_t)now_ms() << 20 ^ (uint64_t)getpid(), random[1] = (uint64_t)(uintptr_t)m;
    memset(address, 0, sizeof *address);
    m->secret = address->secret = random[0];
    address->machine = hash_of_file("/proc/sys/kernel/random/boot_id");
    address->network = stat("/proc/self/ns/net", &network) == 0 ? (uint64_t)network.st_ino : 0;
    address->pid = (int32_t)getpid();
    snprintf(address->name, sizeof address->name, "mok-%016llx-%d", (unsigned long long)random[1], rank);
    gethostname(address->host, sizeof address->host - 1);
    socklen_t length = socket_address(address->name, &name);
    m->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (m->listener < 0 || bind(m->listener, (struct sockaddr *)&name, length) || listen(m->listener, num_ranks)) {
        mok_status status = mk_fail(MOK_E_ENV, "rank %d cannot open a Unix socket for its peers: %s", rank, strerror(errno));
        mk_mesh_close(m);
        return status;
    }
    *mesh = m;
    return MOK_OK;
}

/* --- connecting: to every lower rank, from every higher one --------------------------------------------------------------- */
static bool send_all(int socket, const void *data, size_t bytes, int64_t deadline)
{
    for (size_t done = 0; done < bytes;) {
        ssize_t n = send(socket, (const char *)data + done, bytes - done, MSG_NOSIGNAL);
        struct pollfd p = {socket, POLLOUT, 0};
        if (n > 0)
            done += (size_t)n;
        else if (n < 0 && errno != EAGAIN && errno != EINTR)
            return false;
        else if (poll(&p, 1, left_of(deadline)) == 0)
            return false;
    }
    return true;
}

static bool receive_all(int socket, void *data, size_t bytes, int64_t deadline)
{
    for (size_t done = 0; done < bytes;) {
        ssize_t n = recv(socket, (char *)data + done, bytes - done, 0);
        struct pollfd p = {socket, POLLIN, 0};
        if (n > 0)
            done += (size_t)n;
        else if (n == 0 || (errno != EAGAIN && errno != EINTR))
            return false;
        else if (poll(&p, 1, left_of(deadline)) == 0)
            return false;
    }
    return true;
}

static mok_status connect_to(mk_mesh *m, const mk_address *a, int32_t r, int64_t deadline)
{
    struct sockaddr_un name;
    greeting hello = {a->secret, m->rank};
    socklen_t length = socket_address(a->name, &name);
    int s = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    /* The listener is there, and its backlog holds all ranks: no waiting. */
    if (s < 0 || connect(s, (struct sockaddr *)&name, length) || fcntl(s, F_SETFL, O_NONBLOCK) || !send_all(s, &hello, sizeof hello, deadline)) {
        mok_status status = mk_fail(MOK_E_ENV, "rank %d cannot connect to rank %d (process %d on %s): %s", m->rank, r, a->pid, a->host, strerror(errno));
        if (s >= 0)
            close(s);
        return status;
    }
    m->peers[r].socket = s;
    return MOK_OK;
}

/* Whoever does not know the secret is turned away. */
static void greet(mk_mesh *m, int s, int64_t deadline)
{
    greeting hello;
    int64_t soon = now_ms() + 5000;
    if (receive_all(s, &hello, sizeof hello, soon < deadline ? soon : deadline) && hello.secret == m->secret && hello.rank > m->rank &&
        hello.rank < m->size && m->peers[hello.rank].socket < 0)
        m->peers[hello.rank].socket = s;
    else
        close(s);
}

static void list_unconnected(const mk_mesh *m, char *text, size_t bytes)
{
    size_t used = 0;
    text[0] = 0;
    for (int32_t r = 0; r < m->size && used + 12 < bytes; r++)
        if (r != m->rank && m->peers[r].socket < 0)
            used += (size_t)snprintf(text + used, bytes - used, " %d", r);
}

mok_status mk_mesh_connect(mk_mesh *m, const mk_address *all, int64_t timeout_ms)
{
    int64_t deadline = now_ms() + timeout_ms;
    char missing[200];
    for (int32_t r = 0; r < m->rank; r++)
        MK_TRY(connect_to(m, &all[r], r, deadline));
    for (;;) {
        list_unconnected(m, missing, sizeof missing);
        if (!missing[0])
            break;
        struct pollfd p = {m->listener, POLLIN, 0};
        int ready = poll(&p, 1, left_of(deadline));
        int s = ready > 0 ? accept4(m->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK) : -1;
        if (s >= 0)
            greet(m, s, deadline);
        else if (ready == 0)
            return mk_fail(MOK_E_TIMEOUT, "rank %d waited %lld ms for connections of a group of %d ranks; not there:%s", m->rank, (long long)timeout_ms, m->size,
                           missing);
    }
    close(m->listener);
    m->listener = -1;
    return MOK_OK;
}

/* --- one round ------------------------------------------------------------------------------------------------------------ */
typedef struct exchange {
    mk_mesh *m;
    header head;
    const char *send;
    char *recv;
    size_t bytes;
    int fd;
} exchange;

/* The descriptor rides on the header's first byte. True: nothing more to send, or to be had. */
static bool push_some(const exchange *x, peer *p)
{
    size_t total = sizeof x->head + x->bytes;
    union { struct cmsghdr align; char bytes[CMSG_SPACE(sizeof(int))]; } control;
    while (p->out_done < total) {
        bool in_head = p->out_done < sizeof x->head;
        struct iovec piece = {in_head ? (char *)(uintptr_t)&x->head + p->out_done : (char *)(uintptr_t)x->send + (p->out_done - sizeof x->head),
                              in_head ? sizeof x->head - p->out_done : total - p->out_done};
        struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1};
        if (p->out_done == 0 && x->fd >= 0) {
            memset(&control, 0, sizeof control);
            message.msg_control = control.bytes;
            message.msg_controllen = sizeof control.bytes;
            struct cmsghdr *c = CMSG_FIRSTHDR(&message);
            *c = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
            memcpy(CMSG_DATA(c), &x->fd, sizeof x->fd);
        }
        ssize_t n = sendmsg(p->socket, &message, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0) {
            p->gone |= errno != EAGAIN; /* what it sent before it went may still be read */
            return p->gone;
        }
        p->out_done += (size_t)n;
    }
    return true;
}

static ssize_t receive_some(peer *p, void *to, size_t bytes)
{
    union { struct cmsghdr align; char bytes[CMSG_SPACE(sizeof(int))]; } control;
    struct iovec piece = {to, bytes};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    ssize_t n = recvmsg(p->socket, &message, MSG_CMSG_CLOEXEC);
    for (struct cmsghdr *c = n > 0 ? CMSG_FIRSTHDR(&message) : NULL; c; c = CMSG_NXTHDR(&message, c))
        if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS)
            memcpy(&p->fd, CMSG_DATA(c), sizeof p->fd);
    return n;
}

static bool is_complete(const peer *p) { return p->in_done >= sizeof p->in && p->in_done - sizeof p->in >= p->in.bytes; }

/* True: the message is complete, or there will be none. */
static bool pull_some(exchange *x, int32_t r)
{
    peer *p = &x->m->peers[r];
    char waste[512];
    while (!is_complete(p)) {
        size_t at = p->in_done - sizeof p->in;
        bool in_head = p->in_done < sizeof p->in, fits = !in_head && p->in.round == x->head.round && at < x->bytes;
        size_t want = in_head ? sizeof p->in - p->in_done : p->in.bytes - at;
        if (!in_head && fits)
            want = want < x->bytes - at ? want : x->bytes - at;
        else if (!in_head)
            want = want < sizeof waste ? want : sizeof waste;
        ssize_t n = receive_some(p, in_head ? (char *)&p->in + p->in_done : fits ? x->recv + (size_t)r * x->bytes + at : waste, want);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN)
            return false;
        if (n <= 0) {
            p->gone = true;
            return true;
        }
        p->in_done += (size_t)n;
        if (!in_head && p->in.round == FAREWELL && !x->m->told && is_complete(p)) {
            x->m->told = true;
            snprintf(x->m->missing, sizeof x->m->missing, "%.*s", (int)(n < 250 ? n : 250), waste);
        }
    }
    if (p->in.round == FAREWELL)
        p->gone = true;
    return true;
}

static mok_status say_broken(const mk_mesh *m)
{
    return mk_fail(MOK_E_TIMEOUT, "rank %d: this group of %d ranks is broken, a rank has given up waiting or has ended; not there:%s", m->rank, m->size,
                   m->missing);
}

/* After a round in which somebody was missing. Who gives up first knows whom it waited for, and tells the others as it leaves. */
static mok_status give_up(mk_mesh *m, bool timed_out, int64_t timeout_ms)
{
    size_t used = strlen(m->missing);
    for (int32_t r = 0; r < m->size && used + 12 < sizeof m->missing; r++)
        if (r != m->rank && !m->told && !is_complete(&m->peers[r]) && (timed_out || m->peers[r].gone))
            used += (size_t)snprintf(m->missing + used, sizeof m->missing - used, " %d", r);
    mk_mesh_leave(m);
    if (timed_out)
        return mk_fail(MOK_E_TIMEOUT, "rank %d waited %lld ms at a rendezvous of %d ranks; not there:%s", m->rank, (long long)timeout_ms, m->size, m->missing);
    return say_broken(m);
}

static mok_status judge_sizes(const exchange *x)
{
    const mk_mesh *m = x->m;
    uint64_t zero = m->rank == 0 ? x->bytes : m->peers[0].in.bytes;
    for (int32_t r = 1; r < m->size; r++)
        if ((r == m->rank ? x->bytes : m->peers[r].in.bytes) != zero)
            return mk_fail(MOK_E_MISMATCH, "ranks 0 and %d of this group create and destroy workspaces in different orders", r);
    return MOK_OK;
}

static void start_round(mk_mesh *m)
{
    m->round++;
    for (int32_t r = 0; r < m->size; r++) {
        m->peers[r].in_done = m->peers[r].out_done = 0;
        m->peers[r].in = (header){0, 0};
        m->peers[r].fd = -1;
    }
}

/* Until all have been heard, somebody is gone, or the time is over. */
static mok_status run_round(exchange *x, struct pollfd *polls, int64_t timeout_ms)
{
    mk_mesh *m = x->m;
    int64_t deadline = now_ms() + timeout_ms;
    for (;;) {
        int waiting = 0;
        bool gone = false;
        for (int32_t r = 0; r < m->size; r++) {
            if (r == m->rank)
                continue;
            bool sent = push_some(x, &m->peers[r]), got = pull_some(x, r);
            gone |= m->peers[r].gone && !(is_complete(&m->peers[r]) && m->peers[r].in.round == x->head.round);
            if (!sent || !got)
                polls[waiting++] = (struct pollfd){m->peers[r].socket, (short)((sent ? 0 : POLLOUT) | (got ? 0 : POLLIN)), 0};
        }
        if (gone)
            return give_up(m, false, timeout_ms);
        if (!waiting)
            return MOK_OK;
        if (poll(polls, (nfds_t)waiting, left_of(deadline)) == 0 && now_ms() >= deadline)
            return give_up(m, true, timeout_ms);
    }
}

mok_status mk_mesh_all_gather(mk_mesh *m, const void *send, void *recv, size_t bytes, int fd, int *fds, int64_t timeout_ms)
{
    if (m->broken)
        return say_broken(m);
    struct pollfd *polls = calloc((size_t)m->size, sizeof *polls);
    if (!polls)
        return mk_fail(MOK_E_MEMORY, "no memory to wait for %d ranks", m->size);
    start_round(m);
    exchange x = {m, {m->round, bytes}, send, recv, bytes, fd};
    m->message_bytes = sizeof x.head + bytes;
    if (bytes)
        memmove((char *)recv + (size_t)m->rank * bytes, send, bytes);
    mok_status status = run_round(&x, polls, timeout_ms);
    if (status == MOK_OK)
        status = judge_sizes(&x);
    for (int32_t r = 0; r < m->size; r++) {
        if (r == m->rank)
            continue;
        if (fds && status == MOK_OK)
            fds[r] = m->peers[r].fd;
        else if (m->peers[r].fd >= 0)
            close(m->peers[r].fd);
        m->peers[r].fd = -1;
    }
    free(polls);
    return status;
}

bool mk_mesh_gone(mk_mesh *m, int32_t rank)
{
    struct pollfd hung_up = {m->peers[rank].socket, POLLRDHUP, 0};
    if (rank == m->rank)
        return false;
    return m->peers[rank].gone || hung_up.fd < 0 || (poll(&hung_up, 1, 0) > 0 && (hung_up.revents & (POLLRDHUP | POLLHUP | POLLERR)));
}

void mk_mesh_leave(mk_mesh *m)
{
    if (m->broken)
        return;
    m->broken = true;
    for (int32_t r = 0; r < m->size; r++) {
        peer *p = &m->peers[r];
        header farewell = {FAREWELL, strlen(m->missing)};
        /* Between two messages only, and only if it goes at once. */
        if (p->socket >= 0 && !p->gone && (p->out_done == 0 || p->out_done == m->message_bytes) &&
            send(p->socket, &farewell, sizeof farewell, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)sizeof farewell)
            (void)!send(p->socket, m->missing, strlen(m->missing), MSG_NOSIGNAL | MSG_DONTWAIT);
        if (p->socket >= 0)
            close(p->socket);
        p->socket = -1;
        p->gone = true;
    }
}

void mk_mesh_close(mk_mesh *m)
{
    if (!m)
        return;
    for (int32_t r = 0; r < m->size; r++)
        if (m->peers[r].socket >= 0)
            close(m->peers[r].socket);
    if (m->listener >= 0)
        close(m->listener);
    free(m->peers);
    free(m);
}
