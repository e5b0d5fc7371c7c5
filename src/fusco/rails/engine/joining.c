/* Connections before their handshake is complete. Each end proves that it knows the secret of the address: the server sends
 * a nonce; the client answers with who it is and a tag of that and both nonces; the server replies with who it is and a tag.
 * A recorded handshake is refused, since no nonce is used twice. */
#define _GNU_SOURCE
#include "engine.h"

#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

enum { MAX_JOINING = 256, BACKLOG = 1024, TAG_BYTES = 32, PORT_ATTEMPTS = 64 };
static const int64_t HANDSHAKE_NS = 5000000000, LEAST_HANDSHAKE_NS = 250000000, PAUSE_NS = 50000000, RETRY_NS = 50000000;
/* The kernel repeats a lost SYN after 1, 3, ... seconds; a new attempt is sooner. It gets more time only as long as none on
 * the rail has succeeded; then it gets what the network needs, and once the kernel of the peer has accepted, a busy peer. */
static const int64_t FIRST_ATTEMPT_NS = 300000000, LONGEST_ATTEMPT_NS = 5000000000, AGAIN_NS = 100000000, ANSWER_NS = 500000000;
/* A process that listens, but refuses this end's handshake for so long, is not the peer, or has ended the channel: a peer
 * without descriptors, or with too many connections, may refuse for a moment. */
static const int64_t DENIED_NS = 1500000000;
enum { TIMES_THE_LAST = 3 };
static const char MAGIC[8] = "FUSCORL1", ENDED[] = "the other end closed the connection",
                  FOREIGN[] = "the other end is not an endpoint of fusco.rails of this version",
                  DENIED[] = "the other end refused the handshake: it is another process, or has closed the channel";

struct __attribute__((packed)) hello {
  char magic[8];
  uint8_t nonce[NONCE_BYTES];
};
struct __attribute__((packed)) endpoint_info {
  char magic[8];
  uint8_t name[NAME_BYTES];
  uint32_t worker, num_rails, chunk_bytes, rail, incarnation;
  uint8_t nonce[NONCE_BYTES];
};
struct __attribute__((packed)) answer {
  char magic[8];
  uint32_t worker, num_rails, chunk_bytes;
};
enum { MAX_MESSAGE = sizeof(struct endpoint_info) + TAG_BYTES };

struct joining {
  struct watched watched;
  struct joining *next;    /* of the host's, for a server */
  struct channel *channel; /* of the client */
  struct loop *loop;
  int rail;
  uint32_t incarnation;
  int64_t deadline_ns; /* of a server by the time, of a client by the loop's clock */
  bool is_connecting, has_nonce;
  uint8_t nonce[NONCE_BYTES], peer_nonce[NONCE_BYTES], message[MAX_MESSAGE];
  size_t num_bytes, num_expected;
};

static void release(struct watched *watched) { free(watched); }

/* Authenticate a message; ordered by role, so that no end's message can be sent back to it as its peer's. */
static void make_tag(const struct joining *joining, const uint8_t *secret, bool by_client, const void *body, size_t num_bytes, uint8_t *tag) {
  uint8_t text[6 + 2 * NONCE_BYTES + MAX_MESSAGE];
  bool is_server = !joining->channel;
  memcpy(text, by_client ? "client" : "server", 6);
  memcpy(text + 6, is_server ? joining->nonce : joining->peer_nonce, NONCE_BYTES);
  memcpy(text + 6 + NONCE_BYTES, is_server ? joining->peer_nonce : joining->nonce, NONCE_BYTES);
  memcpy(text + 6 + 2 * NONCE_BYTES, body, num_bytes);
  hmac_sha256(secret, text, 6 + 2 * NONCE_BYTES + num_bytes, tag);
}

static bool has_tag(const struct joining *joining, const uint8_t *secret, bool by_client, size_t num_bytes) {
  uint8_t tag[TAG_BYTES], difference = 0;
  make_tag(joining, secret, by_client, joining->message, num_bytes, tag);
  for (int i = 0; i < TAG_BYTES; i++) difference |= tag[i] ^ joining->message[num_bytes + (size_t)i];
  return !difference;
}

static bool send_all(int fd, const void *data, size_t num_bytes) { /* the buffer of a new socket holds it */
  return send(fd, data, num_bytes, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)num_bytes;
}

static struct joining *joining_new(struct loop *loop, int fd, int rail, void (*on_event)(struct watched *, uint32_t)) {
  struct joining *joining = calloc(1, sizeof *joining);
  if (!joining) abort();
  joining->watched = (struct watched){on_event, release, fd, NULL};
  joining->loop = loop;
  joining->rail = rail;
  random_bytes(joining->nonce, NONCE_BYTES);
  return joining;
}

/* Read a message; 1 if it is complete, 0 if not yet, -1 with the reason. */
static int read_message(struct joining *joining, const char **why) {
  while (joining->num_bytes < joining->num_expected) {
    ssize_t num = recv(joining->watched.fd, joining->message + joining->num_bytes, joining->num_expected - joining->num_bytes, MSG_DONTWAIT);
    if (num <= 0) {
      if (num < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
      *why = num ? strerror(errno) : ENDED;
      return -1;
    }
    joining->num_bytes += (size_t)num;
  }
  joining->num_bytes = 0;
  if (!memcmp(joining->message, MAGIC, sizeof MAGIC)) return 1;
  *why = FOREIGN;
  return -1;
}

/* ---- server ---- */

static void leave(struct joining *joining) { /* the host's list */
  struct host *host = joining->loop->host;
  for (struct joining **at = &host->joinings; *at; at = &(*at)->next) {
    if (*at == joining) {
      *at = joining->next;
      host->num_joinings--;
      return;
    }
  }
}

static void refuse(struct joining *joining) {
  leave(joining);
  joining->loop->host->progress.num_refused++;
  loop_forget(joining->loop, &joining->watched, false);
}

/* Under the host's lock. */
static struct channel *find_named(const struct host *host, const uint8_t *name) {
  struct channel *channel = host->named;
  while (channel && (channel->dials || memcmp(channel->name, name, NAME_BYTES))) channel = channel->next_named;
  return channel;
}

/* The listen whose secret the client knows; its number in the name is a hint. Under the host's lock. */
static struct listen *find_listen(const struct joining *joining, const uint8_t *name) {
  uint32_t hint;
  memcpy(&hint, name, sizeof hint);
  for (int pass = 0; pass < 2; pass++) {
    for (struct listen *each = joining->loop->host->listens; each; each = each->next) {
      if ((each->number == hint) == !pass && has_tag(joining, each->secret, true, sizeof(struct endpoint_info))) return each;
    }
  }
  return NULL;
}

/* A new channel of a listen, unless the peer has had it before. Under the host's lock. */
static struct channel *new_channel(struct host *host, struct listen *listen, const struct endpoint_info *peer) {
  for (int i = 0; i < listen->num_names; i++) {
    if (!memcmp(listen->names[i], peer->name, NAME_BYTES)) return NULL;
  }
  listen->names = realloc(listen->names, (size_t)(listen->num_names + 1) * NAME_BYTES);
  if (!listen->names) abort();
  memcpy(listen->names[listen->num_names++], peer->name, NAME_BYTES);
  struct channel *channel = channel_new(host, (int)peer->worker, (int)peer->num_rails, peer->chunk_bytes, peer->name, listen->secret);
  channel->next_named = host->named;
  host->named = channel;
  struct channel **last = &listen->accepted;
  while (*last) last = &(*last)->next_accepted;
  *last = channel;
  host_changed(host);
  return channel;
}

/* Give the connection to its channel, which is new with the first. Under the host's lock; false if it is refused. */
static bool join(struct joining *joining, const struct endpoint_info *peer) {
  struct host *host = joining->loop->host;
  if (!peer->chunk_bytes || peer->chunk_bytes > INT32_MAX || !peer->num_rails || peer->num_rails > INT32_MAX) return false;
  if (peer->rail != (uint32_t)joining->rail || peer->rail >= peer->num_rails) return false;
  struct channel *channel = find_named(host, peer->name);
  if (channel) {
    if (!has_tag(joining, channel->secret, true, sizeof *peer)) return false;
  } else {
    struct listen *listen = find_listen(joining, peer->name);
    channel = listen ? new_channel(host, listen, peer) : NULL;
  }
  if (!channel || joining->rail >= channel->num_rails) return false;
  struct arrival *arrival = malloc(sizeof *arrival);
  if (!arrival) abort();
  const struct sharing *sharing = &host->sharing;
  struct answer answer = {.worker = (uint32_t)host->worker, .num_rails = (uint32_t)sharing->num_rails, .chunk_bytes = (uint32_t)sharing->limits.chunk_bytes};
  memcpy(answer.magic, MAGIC, sizeof MAGIC);
  uint8_t text[sizeof answer + TAG_BYTES];
  memcpy(text, &answer, sizeof answer);
  make_tag(joining, channel->secret, false, text, sizeof answer, text + sizeof answer);
  send_all(joining->watched.fd, text, sizeof text); /* if that fails, so does the connection */
  *arrival = (struct arrival){channel->arrivals, loop_detach(joining->loop, &joining->watched), joining->rail, peer->incarnation};
  channel->arrivals = arrival;
  loop_kick(channel, false, false);
  return true;
}

static void on_client(struct watched *watched, uint32_t events) {
  struct joining *joining = (struct joining *)watched;
  const char *why;
  int complete = read_message(joining, &why);
  (void)events;
  if (!complete) return;
  struct host *host = joining->loop->host;
  bool joined = false;
  if (complete > 0) {
    struct endpoint_info peer;
    memcpy(&peer, joining->message, sizeof peer);
    memcpy(joining->peer_nonce, peer.nonce, NONCE_BYTES);
    pthread_mutex_lock(&host->lock);
    joined = join(joining, &peer);
    pthread_mutex_unlock(&host->lock);
  }
  if (joined) {
    leave(joining);
  } else {
    refuse(joining);
  }
}

static void set_accepting(struct host *host, bool accepts) {
  for (int rail = 0; rail < host->sharing.num_rails; rail++) {
    loop_watch(host->loops, &host->listeners[rail]->watched, accepts ? EPOLLIN : 0);
  }
  host->paused_until_ns = accepts ? 0 : now_ns() + PAUSE_NS;
}

/* Make room for one more: the oldest leaves, but only after a time in which a peer completes its handshake. */
static bool has_room(struct host *host, int64_t now) {
  struct joining *oldest = host->joinings;
  if (host->num_joinings < MAX_JOINING) return true;
  while (oldest->next) oldest = oldest->next;
  bool is_old = now - (oldest->deadline_ns - HANDSHAKE_NS) > LEAST_HANDSHAKE_NS;
  if (is_old) refuse(oldest);
  return is_old;
}

static void on_listener(struct watched *watched, uint32_t events) {
  struct listener *listener = (struct listener *)watched;
  struct host *host = listener->host;
  int fd = accept4(watched->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
  (void)events;
  if (fd < 0) {
    if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) set_accepting(host, false);
    return; /* else the client has closed it again */
  }
  if (!has_room(host, now_ns())) {
    close(fd); /* a peer tries again */
    return;
  }
  struct loop *loop = host->loops;
  struct joining *joining = joining_new(loop, fd, listener->rail, on_client);
  struct hello hello;
  memcpy(hello.magic, MAGIC, sizeof MAGIC);
  memcpy(hello.nonce, joining->nonce, NONCE_BYTES);
  joining->num_expected = MAX_MESSAGE;
  joining->deadline_ns = now_ns() + HANDSHAKE_NS;
  /* NCCL's receivers send nothing but credits, and TCP's acknowledgements of its class: they must not wait behind borrowed chunks. */
  configure_socket(fd, host->rails[listener->rail].address.ss_family, !host->is_nccl && host_defers(host, listener->rail));
  send_all(fd, &hello, sizeof hello);
  joining->next = host->joinings;
  host->joinings = joining;
  host->num_joinings++;
  if (loop_add(loop, &joining->watched, EPOLLIN)) refuse(joining); /* the peer tries again */
}

void joining_check_host(struct host *host, int64_t now) {
  for (struct joining *each = host->joinings, *next; each; each = next) {
    next = each->next;
    if (now > each->deadline_ns) refuse(each);
  }
  if (host->paused_until_ns && now >= host->paused_until_ns) set_accepting(host, true);
}

/* Listen on a rail and a port, or on any port if it is 0; the descriptor, or -1 with errno. */
static int listen_on(const struct rail *rail, int port) {
  struct sockaddr_storage address = rail->address;
  int one = 1, fd = socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  set_port(&address, port);
  if (port) setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  if (bind(fd, (struct sockaddr *)&address, rail->address_bytes) || listen(fd, BACKLOG)) {
    int code = errno;
    close(fd);
    errno = code;
    return -1;
  }
  return fd;
}

/* Listen on all rails; with one port for all under NCCL, whose handles have room for one. */
bool joining_listen(struct host *host, char *why) {
  int fds[MAX_RAILS], num = 0, num_rails = host->sharing.num_rails;
  for (int attempt = 0; attempt < PORT_ATTEMPTS && num < num_rails; attempt++) {
    while (num) close(fds[--num]);
    for (; num < num_rails; num++) {
      if ((fds[num] = listen_on(host->rails + num, host->is_nccl && num ? host->ports[0] : 0)) < 0) break;
      struct sockaddr_storage address;
      socklen_t num_bytes = sizeof address;
      getsockname(fds[num], (struct sockaddr *)&address, &num_bytes);
      host->ports[num] = ntohs(address.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&address)->sin6_port : ((struct sockaddr_in *)&address)->sin_port);
    }
    if (num < num_rails && errno != EADDRINUSE) break;
  }
  if (num < num_rails) {
    const struct rail *rail = host->rails + num;
    snprintf(why, WHY_BYTES, "cannot listen on %s, %s: %s", rail->named.interface, rail->text, strerror(errno));
    while (num) close(fds[--num]);
    return false;
  }
  for (int i = 0; i < num; i++) {
    struct listener *listener = calloc(1, sizeof *listener);
    if (!listener) abort();
    *listener = (struct listener){.watched = {on_listener, release, fds[i], NULL}, .rail = i, .host = host};
    host->listeners[i] = listener;
  }
  return true;
}

bool joining_begin(struct host *host, char *why) {
  for (int i = 0; i < host->sharing.num_rails; i++) {
    const char *problem = loop_add(host->loops, &host->listeners[i]->watched, EPOLLIN);
    if (!problem) continue;
    snprintf(why, WHY_BYTES, "cannot wait for connections on %s: %s", host->rails[i].named.interface, problem);
    return false;
  }
  return true;
}

struct listen *joining_offer(struct host *host) {
  struct listen *listen = calloc(1, sizeof *listen);
  if (!listen) abort();
  random_bytes(listen->secret, SECRET_BYTES);
  pthread_mutex_lock(&host->lock);
  listen->number = ++host->num_listens;
  listen->next = host->listens;
  host->listens = listen;
  pthread_mutex_unlock(&host->lock);
  return listen;
}

struct channel *joining_accepted(struct host *host, struct listen *listen) {
  pthread_mutex_lock(&host->lock);
  struct channel *channel = listen->accepted;
  if (channel) listen->accepted = channel->next_accepted;
  pthread_mutex_unlock(&host->lock);
  return channel;
}

void joining_withdraw(struct host *host, struct listen *listen) {
  pthread_mutex_lock(&host->lock);
  for (struct listen **at = &host->listens; *at; at = &(*at)->next) {
    if (*at == listen) {
      *at = listen->next;
      break;
    }
  }
  pthread_mutex_unlock(&host->lock);
  for (struct channel *channel; (channel = joining_accepted(host, listen));) channel_close(channel, true); /* never accepted */
  free(listen->names);
  free(listen);
}

/* Close what listens; the loops have ended. */
void joining_stop(struct host *host) {
  for (int i = 0; i < host->sharing.num_rails; i++) {
    if (host->listeners[i]) loop_forget(host->loops, &host->listeners[i]->watched, false);
  }
  while (host->joinings) {
    struct joining *joining = host->joinings;
    host->joinings = joining->next;
    loop_forget(host->loops, &joining->watched, false);
  }
}

/* ---- client ---- */

static void attempt_failed(struct joining *joining, const char *why, bool is_refused, bool is_denied) {
  struct channel *channel = joining->channel;
  struct attempt *attempt = channel->attempts + joining->rail;
  if (!is_denied || !attempt->denied_since_ns) attempt->denied_since_ns = is_denied ? joining->loop->clock_ns : 0;
  loop_forget(joining->loop, &joining->watched, false);
  attempt->joining = NULL;
  attempt->next_ns = joining->loop->clock_ns + RETRY_NS;
  attempt->is_refused = is_refused;
  if (!attempt->was_connected) attempt->limit_ns = 2 * attempt->limit_ns < LONGEST_ATTEMPT_NS ? 2 * attempt->limit_ns : LONGEST_ATTEMPT_NS;
  channel_note_failure(channel, joining->rail, why);
}

/* Say who this end is, once the server's nonce is known. */
static void send_info(struct joining *joining) {
  const struct channel *channel = joining->channel;
  const struct sharing *sharing = &channel->host->sharing;
  struct endpoint_info this = {.worker = (uint32_t)channel->host->worker, .num_rails = (uint32_t)sharing->num_rails,
                              .chunk_bytes = (uint32_t)sharing->limits.chunk_bytes, .rail = (uint32_t)joining->rail, .incarnation = joining->incarnation};
  uint8_t text[MAX_MESSAGE];
  memcpy(this.magic, MAGIC, sizeof MAGIC);
  memcpy(this.name, channel->name, NAME_BYTES);
  memcpy(this.nonce, joining->nonce, NONCE_BYTES);
  memcpy(text, &this, sizeof this);
  make_tag(joining, channel->secret, true, text, sizeof this, text + sizeof this);
  joining->num_expected = sizeof(struct answer) + TAG_BYTES;
  send_all(joining->watched.fd, text, sizeof text);
}

static void on_server(struct watched *watched, uint32_t events) {
  struct joining *joining = (struct joining *)watched;
  struct channel *channel = joining->channel;
  const char *why = NULL;
  if (joining->is_connecting) {
    int code = 0;
    socklen_t num_bytes = sizeof code;
    getsockopt(watched->fd, SOL_SOCKET, SO_ERROR, &code, &num_bytes);
    if (code) {
      attempt_failed(joining, strerror(code), code == ECONNREFUSED, false);
      return;
    }
    struct attempt *attempt = channel->attempts + joining->rail;
    int64_t limit_ns = TIMES_THE_LAST * (now_ns() - attempt->begun_ns);
    attempt->limit_ns = limit_ns > AGAIN_NS ? limit_ns : AGAIN_NS;
    attempt->was_connected = true;
    joining->is_connecting = false;
    joining->deadline_ns += ANSWER_NS;
    loop_watch(joining->loop, watched, EPOLLIN);
  }
  if (!(events & ~(uint32_t)EPOLLOUT)) return;
  int complete = read_message(joining, &why);
  if (complete > 0 && !joining->has_nonce) {
    joining->has_nonce = true;
    memcpy(joining->peer_nonce, ((struct hello *)joining->message)->nonce, NONCE_BYTES);
    send_info(joining);
    return;
  }
  if (complete > 0 && !has_tag(joining, channel->secret, false, sizeof(struct answer))) {
    why = "the other end does not know the secret of the address";
    complete = -1;
  }
  if (complete > 0) {
    struct attempt *attempt = channel->attempts + joining->rail;
    attempt->joining = NULL;
    attempt->is_refused = false;
    attempt->denied_since_ns = 0;
    channel_attach(channel, loop_detach(joining->loop, watched), joining->rail, joining->incarnation);
  } else if (complete < 0) {
    attempt_failed(joining, joining->has_nonce && why == ENDED ? DENIED : why, false, joining->has_nonce || why == FOREIGN);
  }
}

/* A peer on this host, in its network: bytes for it take the loopback device, whichever interface has its address. */
static bool is_on_this_host(const struct sockaddr *peer) {
  struct ifaddrs *all, *each;
  bool is_found = false;
  if (getifaddrs(&all)) return false;
  for (each = all; each && !is_found; each = each->ifa_next) {
    const struct sockaddr *address = each->ifa_addr;
    if (!address || address->sa_family != peer->sa_family) continue;
    is_found = peer->sa_family == AF_INET
                   ? ((const struct sockaddr_in *)address)->sin_addr.s_addr == ((const struct sockaddr_in *)peer)->sin_addr.s_addr
                   : peer->sa_family == AF_INET6 && !memcmp(&((const struct sockaddr_in6 *)address)->sin6_addr, &((const struct sockaddr_in6 *)peer)->sin6_addr, 16);
  }
  freeifaddrs(all);
  return is_found;
}

/* Bind to a rail, so that bytes leave by it wherever routes lead, and begin to connect; 0 or an error number. */
static int begin_connect(int fd, const struct rail *rail, const struct sockaddr_storage *peer, socklen_t peer_bytes) {
  struct sockaddr_storage local = rail->address;
  const char *interface = rail->named.interface;
  /* EPERM: kernels before 5.7 without CAP_NET_RAW; routes decide */
  bool leaves = !is_on_this_host((const struct sockaddr *)peer);
  if (leaves && setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, interface, (socklen_t)strlen(interface)) && errno != EPERM) return errno;
  if (bind(fd, (struct sockaddr *)&local, rail->address_bytes)) return errno;
  if (connect(fd, (const struct sockaddr *)peer, peer_bytes) && errno != EINPROGRESS) return errno;
  return 0;
}

static void dial(struct channel *channel, int rail, int64_t now) {
  struct attempt *attempt = channel->attempts + rail;
  const struct host *host = channel->host;
  const struct sockaddr_storage *peer = channel->peer_address + rail;
  int fd = socket(peer->ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) {
    channel_note_failure(channel, rail, strerror(errno));
    attempt->next_ns = now + RETRY_NS;
    return;
  }
  struct joining *joining = joining_new(channel->loop, fd, rail, on_server);
  attempt->joining = &joining->watched;
  if (!attempt->limit_ns) attempt->limit_ns = FIRST_ATTEMPT_NS;
  attempt->begun_ns = now_ns();
  joining->channel = channel;
  joining->incarnation = ++attempt->incarnation;
  joining->is_connecting = true;
  joining->num_expected = sizeof(struct hello);
  joining->deadline_ns = now + attempt->limit_ns;
  configure_socket(fd, peer->ss_family, host_defers(host, rail));
  int code = begin_connect(fd, host->rails + rail, peer, channel->peer_address_bytes[rail]);
  const char *why = code ? strerror(code) : loop_add(channel->loop, &joining->watched, EPOLLOUT);
  if (why) attempt_failed(joining, why, code == ECONNREFUSED, false);
}

/* Begin attempts on rails that are not connected, and give up late ones. */
void joining_dial(struct channel *channel, int64_t now, uint32_t links) {
  bool all_refused = !channel->num_connections, are_denied = false;
  for (int rail = 0; rail < channel->num_rails; rail++) {
    struct attempt *attempt = channel->attempts + rail;
    bool has_link = links >> rail & 1;
    struct joining *joining = (struct joining *)attempt->joining;
    if (joining) {
      if (now > joining->deadline_ns || !has_link) attempt_failed(joining, "no answer", false, false);
    } else if (!channel->connections[rail] && !has_link) {
      channel_note_failure(channel, rail, "the interface has no link");
    } else if (!channel->connections[rail] && now >= attempt->next_ns) {
      dial(channel, rail, now);
    }
    bool is_denied = attempt->denied_since_ns && now - attempt->denied_since_ns > DENIED_NS;
    all_refused &= attempt->is_refused || is_denied;
    are_denied |= is_denied;
  }
  if (all_refused) channel_unreachable(channel, are_denied ? "its address takes no rail of this end" : "it listens no more");
}
