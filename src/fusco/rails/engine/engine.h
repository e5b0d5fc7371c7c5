/* Messages over all idle NICs of a host.
 *
 *   endpoint.c  nccl.c    who calls: Python (fusco.rails) and NCCL
 *   opening.c             configuration and life of an endpoint
 *   loop.c                its threads, or its polling; each loop waits for the sockets of its channels
 *   joining.c             listening, dialling and handshakes
 *   channel.c             connections of a channel, their failure and replacement
 *   messages.c            requests in order, as chunks
 *   connection.c          credits and chunks out, records and payloads in
 *   watched.c  host.c     descriptors that a loop waits for, and what all channels of an endpoint share
 *   schedule.c  board.c   the choice of a rail, and what workers know of each other
 *
 * Each calls only what is below it. A channel belongs to one loop, so its state needs no lock. Callers append requests to a list of the channel, under the
 * loop's lock, and read their state.
 */
#pragma once

#include "schedule.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/types.h>

#pragma GCC visibility push(hidden)

enum {
  MAX_DEPTH = 32,        /* of the limits */
  MAX_OUTSTANDING = 128, /* chunks on a connection that the peer has not acknowledged */
  MAX_LOOPS = 8,
  MAX_GRANTS = 256, /* buffers that a receiver grants ahead of the messages */
  SECRET_BYTES = 32,
  NAME_BYTES = 16, /* of a channel */
  NONCE_BYTES = 16,
  RECORD_BYTES = 32,
  TEXT_BYTES = 112 /* of why a rail has failed */
};

/* ---- digest.c ---- */
void hmac_sha256(const uint8_t key[SECRET_BYTES], const void *message, size_t num_bytes, uint8_t tag[32]);
void random_bytes(void *to, size_t num_bytes);

/* ---- loop.c ---- */
struct watched;
typedef void event_handler(struct watched *self, uint32_t events);
struct watched { /* the first member of what waits for a descriptor */
  event_handler *on_event;
  void (*release)(struct watched *self);
  int fd;
  struct watched *next_dead;
};

struct channel;
struct host;
struct loop {
  struct host *host;
  pthread_t thread;
  int index, epoll_fd, wake_fd;
  bool is_started;
  atomic_bool is_asleep, ends;
  pthread_mutex_t lock;     /* of `ready`, and of what channels say of it */
  struct channel *ready;    /* channels with something posted */
  struct channel *channels; /* all channels of this loop */
  struct channel *turn;     /* that is served first next time */
  struct watched *dead;     /* released after the current events */
  int64_t next_check_ns, next_board_ns, next_rescue_ns;
  /* Limits of failures count the time in which this end looked. One that is polled may pause, and then must look at what
   * has come meanwhile before it gives anything up. */
  int64_t clock_ns, checked_ns;
  char scratch[256 * 1024]; /* for payloads that have arrived before */
};

bool loop_open(struct loop *loop, struct host *host, int index); /* false with errno; loop_free follows in any case */
bool loop_start(struct loop *loop);                              /* its thread; the same */
void loop_stop(struct loop *loop);
int64_t loop_poll(struct loop *loop); /* without a thread; nanoseconds until it is to be called again at the latest */
void loop_take_ready(struct loop *loop);
void loop_free(struct loop *loop);

/* ---- watched.c ---- */
void loop_wake(struct loop *loop);
const char *loop_add(struct loop *loop, struct watched *watched, uint32_t events); /* NULL, or why not: no memory, say */
void loop_watch(struct loop *loop, struct watched *watched, uint32_t events);      /* for other events than before */
void loop_forget(struct loop *loop, struct watched *watched, bool aborts); /* closes and, later, releases it */
int loop_detach(struct loop *loop, struct watched *watched);               /* the same, but returns the descriptor */
bool loop_kick(struct channel *channel, bool closes, bool is_released); /* has its loop look at it; false if it has ended */

/* ---- host.c: what all channels of an endpoint share ---- */
struct config { /* texts; NULL: the default */
  const char *worker, *rails, *limits, *policy, *timeout_s, *threads, *board;
};

struct rail {
  struct named_rail named; /* the interface and its speed */
  struct sockaddr_storage address;
  socklen_t address_bytes;
  char text[INET6_ADDRSTRLEN];
};

struct listen {
  struct listen *next;
  uint32_t number;
  uint8_t secret[SECRET_BYTES];
  struct channel *accepted; /* connected by peers, not yet given to the caller */
  uint8_t (*names)[NAME_BYTES]; /* of all channels it has had: none may begin twice */
  int num_names;
};

struct listener {
  struct watched watched;
  struct host *host;
  int rail;
};

struct progress { /* what a caller may look at without a call */
  _Atomic uint64_t num_bytes; /* written and read, payloads and records */
  atomic_uint num_done;      /* requests */
  atomic_uint num_refused;   /* connections that were foreign, replayed or late */
  atomic_uint changes;       /* channels that were accepted, connected or lost, and requests that notify; a futex */
  atomic_uint num_waiting;   /* for the changes */
};

struct host {
  struct progress progress;
  struct sharing sharing;
  struct rail rails[MAX_RAILS];
  int worker, num_loops, pid, query_fd;
  bool is_nccl; /* one port for all rails, and connections on which one end only sends messages */
  double timeout_s;
  void (*log)(bool warns, const char *text); /* NULL: none */
  struct loop *loops;
  struct host *next; /* of all hosts of the process */
  struct listener *listeners[MAX_RAILS];
  int ports[MAX_RAILS];
  int64_t retry_ns;          /* between looks for room on a rail */
  struct joining *joinings;  /* of loop 0: connections of peers whose handshake is under way, the newest first */
  int num_joinings;
  int64_t paused_until_ns;   /* accepting, after it has failed */
  atomic_uint links;         /* mask of the rails that have a link */
  atomic_uint waiting;       /* mask of the loops whose channels wait for room on a rail, which others give back */
  pthread_mutex_t lock;      /* of what follows */
  struct listen *listens;
  struct channel *named; /* all channels that peers may connect again */
  uint32_t num_listens;
  unsigned next_loop;
};

void host_changed(struct host *host);
bool host_wait(struct host *host, uint32_t seen, int64_t limit_ns);
void host_check_links(struct host *host);
bool host_defers(const struct host *host, int rail); /* whether its traffic on a rail asks for a lower network priority */
double host_least_late_s(const struct host *host, int rail);
void set_port(struct sockaddr_storage *address, int port);
void say(const struct host *host, bool warns, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* ---- the wire: records of 32 bytes; DATA and TOO_LARGE are followed by a payload of `mask` bytes ----
 *
 *              of a credit                            of a data record
 * seq          number of the message, from 0          the same
 * size         bytes of the receive buffer            bytes of the message
 * slot         chunk that has arrived                 chunk that follows
 * mask         rails that are idle at the receiver    bytes of the payload
 * epoch        age of the mask: counts credits        0
 */
enum {
  DATA = 1,  /* a chunk follows */
  GRANT,     /* a receive is posted: a buffer of `size` bytes for message `seq` */
  ACK,       /* chunk `slot` of message `seq` has arrived */
  TOO_LARGE, /* message `seq` of `size` bytes does not fit into the buffer granted */
  RAIL_DOWN, /* rail `slot` has failed at the sender of this record, its connection `epoch` */
  BYE,       /* the sender of this record has closed the channel */
  RECORD_MAGIC = 0xF5C1
};

struct record { /* all hosts are little-endian */
  uint64_t seq, size;
  uint32_t slot, mask, epoch;
  uint16_t kind, magic;
};
_Static_assert(sizeof(struct record) == RECORD_BYTES, "the wire");

/* ---- connection.c ---- */
struct posted { /* a chunk that was given to a connection */
  uint64_t seq;
  uint32_t chunk, num_bytes;
  int64_t at_ns;
  uint64_t end;            /* bytes written to the connection at its end */
  bool is_late, is_queued; /* queued: not yet being written */
  bool has_passed;         /* it has left the network: the kernel of the peer has it, so it delays nothing on the rail */
};

struct connection;
typedef const char *record_handler(struct connection *connection, const struct record *record, bool was_wanted); /* NULL, or why it must end */

struct connection {
  struct watched watched;
  struct channel *channel;
  record_handler *take; /* of each record that has arrived, with its payload */
  int rail;
  uint32_t incarnation; /* counts the connections of this channel and rail */
  struct posted outstanding[MAX_OUTSTANDING]; /* in the order in which they are written */
  int num_outstanding;
  double typical_s; /* for which a chunk is on the network */
  uint64_t num_written;
  bool wants_write, is_closed;
  uint8_t *credits; /* records that overtake chunks */
  size_t num_credits, credit_room, credits_sent;
  struct record frame; /* the chunk being written */
  size_t frame_sent;   /* bytes of record and payload */
  bool has_frame;
  uint8_t *kept; /* a copy of the frame's payload, once its memory is the caller's again */
  struct record record; /* being read */
  size_t num_header, num_payload;
  bool reads_payload;
  uint64_t num_acked; /* bytes, by the peer's kernel */
  int64_t progress_ns, drains_until_ns; /* 0: it does not close */
};

struct connection *connection_new(struct channel *channel, int fd, int rail, uint32_t incarnation, event_handler *on_event, record_handler *take);
void connection_credit(struct connection *connection, const struct record *record);
bool connection_has_output(const struct connection *connection);
bool connection_owes_too_much(const struct connection *connection);
extern const char NOT_READ[], PEER_CLOSED[]; /* the latter: the peer's kernel has ended a connection in order, as only processes do that end */
const char *connection_write(struct connection *connection); /* NULL, or why it has failed */
const char *connection_read(struct connection *connection, ssize_t budget); /* the same, after so many bytes or all */
struct posted *connection_find(struct connection *connection, uint64_t seq, uint32_t chunk);
void connection_remove(struct connection *connection, struct posted *posted);
void connection_note_passed(struct connection *connection, struct posted *posted);
void connection_count_passed(struct connection *connection);
void connection_put_back(struct connection *connection, int64_t now, bool withdraws);
bool connection_is_stalled(struct connection *connection, int64_t now);
void connection_release_memory(struct connection *connection);
bool configure_socket(int fd, int family, bool defers);

/* ---- messages.c ---- */
enum { IS_FREE, IS_PENDING, IS_WAITED_FOR, IS_DONE };
enum result { SUCCESS, MESSAGE_TOO_LARGE, CHANNEL_CLOSED, PEER_LOST, PEER_LEFT, ENDPOINT_FAILED, WAS_FORKED };

struct request { /* of the caller, who may free it once it is done; Python's twin is in fusco/rails/channel.py */
  struct request *next; /* posted, not yet taken by the loop */
  char *data;
  uint64_t size;      /* of the buffer */
  uint64_t num_bytes; /* of the message, once done */
  uint64_t seq;
  int64_t finished_ns;
  atomic_uint state; /* a futex */
  int32_t result;
  uint32_t is_receive, notifies;
  /* of the loop */
  uint8_t *chunks; /* for each chunk, whether it was acknowledged, or has arrived; once the message has begun */
  uint32_t num_chunks, num_left, is_too_large, unused;
};

struct queue { /* a ring of the requests that are not done; NULL: done before an earlier one */
  struct request **items;
  uint64_t first, end; /* numbers of messages */
  size_t room;
};

struct again { /* chunks to be sent again, lost with their rail or late */
  struct { uint64_t seq; uint32_t chunk; } *items;
  size_t begin, end, room;
};

int messages_post(struct channel *channel, struct request *request); /* a result */
void messages_take_posted(struct channel *channel);
void messages_put_back(struct channel *channel, uint64_t seq, uint32_t chunk);
bool messages_has_chunk(const struct channel *channel);
bool messages_pop(struct channel *channel, uint64_t *seq, uint32_t *chunk);
struct request *messages_outgoing(const struct channel *channel, uint64_t seq, uint32_t chunk); /* NULL: not needed any more */
uint32_t messages_payload(const struct channel *channel, const struct request *message, uint32_t chunk, const char **payload);
struct request *messages_incoming(const struct channel *channel, uint64_t seq); /* NULL: done */
const char *messages_granted(struct channel *channel, uint64_t seq, uint64_t size);
const char *messages_acked(struct channel *channel, uint64_t seq, uint32_t chunk);
char *messages_target(struct channel *channel, const struct record *record, bool *is_wanted, const char **why);
void messages_arrived(struct channel *channel, const struct record *record);
void messages_fail(struct channel *channel, int result);
bool messages_are_done(const struct channel *channel);
/* What is wrong with what a peer does, in words that stay until it does something wrong again. */
const char *problem_of(struct channel *channel, const char *format, ...) __attribute__((format(printf, 2, 3)));
bool request_wait(struct request *request, int64_t limit_ns);

/* ---- channel.c ---- */
struct attempt { /* to connect a rail */
  int64_t next_ns, limit_ns, begun_ns;
  int64_t denied_since_ns; /* all attempts since then ended at a process that does not take this end for its peer; 0: the last did not */
  uint32_t incarnation;
  bool was_connected, is_refused;
  struct watched *joining; /* whose handshake is under way */
};

struct arrival { /* a connection that a peer has made */
  struct arrival *next;
  int fd, rail;
  uint32_t incarnation;
};

struct channel {
  /* Callers look at this without a call; Python's twin is in fusco/rails/channel.py. */
  atomic_uint usable; /* mask of the rails that are connected */
  atomic_int error;   /* a result, once it is broken or closed */
  atomic_uint is_closed;
  int32_t peer, num_rails, num_seen; /* seen: rails that were connected when it broke */
  uint64_t num_bytes, num_owed; /* written and read; of credits, not yet written */
  uint8_t name[NAME_BYTES];
  char reason[2048]; /* of the error */

  struct host *host;
  struct loop *loop;
  struct channel *next_ready, *next_in_loop, *next_named, *next_accepted;
  /* under the loop's lock */
  bool is_ready, closes, is_ended, is_released;
  struct request *posted[2], **last_posted[2]; /* by direction */
  uint64_t num_posted[2];
  char *gives_up; /* why the caller does */
  bool is_added;
  uint64_t id; /* random; in NCCL's handle while it is being connected */
  uint8_t secret[SECRET_BYTES];
  uint32_t peer_chunk_bytes;
  _Atomic int64_t first_connected_ns;
  struct arrival *arrivals; /* under the host's lock */
  /* of the loop */
  struct connection *connections[MAX_RAILS];
  int num_connections;
  char failures[MAX_RAILS][TEXT_BYTES], problem[TEXT_BYTES];
  struct scheduler scheduler;
  struct queue sends, receives;
  uint64_t next_seq; /* of the next chunk that was never sent */
  uint32_t next_chunk;
  uint64_t next_grant;          /* the first receive that was not granted */
  uint64_t granted[MAX_GRANTS]; /* 1 + bytes of buffers for messages that are not here yet */
  struct again again;
  int num_begun;
  int64_t without_rail_ns, closing_ns, created_ns;
  bool was_connected, peer_said_bye, peer_has_ended, dials, is_told;
  struct sockaddr_storage peer_address[MAX_RAILS];
  socklen_t peer_address_bytes[MAX_RAILS];
  struct attempt attempts[MAX_RAILS];
};

struct channel *channel_new(struct host *host, int peer, int num_rails, uint32_t peer_chunk_bytes, const uint8_t *name, const uint8_t *secret);
void channel_dial(struct channel *channel); /* after its peer's addresses are set */
void channel_close(struct channel *channel, bool is_released); /* begins; `is_closed` is set at the end, or it is freed */
void channel_free(struct channel *channel);
/* for its loop */
void channel_ready(struct channel *channel);
void channel_step(struct channel *channel, int64_t now, bool rescues, int64_t *wait_ns);
bool channel_check(struct channel *channel, int64_t now, uint32_t links, bool *is_busy); /* its connections; true: dial rails that have none */
void channel_check_rails(struct channel *channel, int64_t now); /* that one is left */
bool channel_waits(const struct channel *channel);
bool channel_has_ended(const struct channel *channel);
void channel_abandon(struct channel *channel); /* its loop ends */
void channel_attach(struct channel *channel, int fd, int rail, uint32_t incarnation);
void channel_unreachable(struct channel *channel, const char *reason);
void channel_note_failure(struct channel *channel, int rail, const char *reason);

/* ---- joining.c: handshakes, listening and dialling ---- */
bool joining_listen(struct host *host, char *why); /* on all rails */
bool joining_begin(struct host *host, char *why);  /* to accept */
struct listen *joining_offer(struct host *host);   /* a secret by which peers connect */
struct channel *joining_accepted(struct host *host, struct listen *listen); /* the next channel, or NULL */
void joining_withdraw(struct host *host, struct listen *listen); /* frees it */
void joining_check_host(struct host *host, int64_t now);
void joining_stop(struct host *host);
void joining_dial(struct channel *channel, int64_t now, uint32_t links);

/* ---- opening.c ---- */
struct host *host_open(const struct config *config, bool is_nccl, int num_loops, void (*log)(bool, const char *), char *why); /* NULL with why */
bool host_start(struct host *host, char *why); /* its threads; false after closing it */
void host_close(struct host *host);            /* channels that are open end at once, and stay with their owners */
void host_stop_all(void);                      /* when the process ends */
bool parse_ip(const char *text, struct sockaddr_storage *address, socklen_t *num_bytes);

#pragma GCC visibility pop
