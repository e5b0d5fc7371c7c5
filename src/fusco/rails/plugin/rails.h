/* fusco rails for NCCL: messages over all idle NICs of a host, as fusco.rails does in Python.
 *
 * The wire (handshake.py, wire.py), the board (board.py) and the scheduler (schedule.py, scheduler.py) are those of the
 * Python package, so both kinds of processes share a host's board and can connect to each other. A process has a few
 * threads ("loops"). Each waits for the sockets of its channels; a channel belongs to one loop, so its state needs no
 * lock. NCCL's threads post requests in a ring of the channel and read their state.
 */
#pragma once

#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/types.h>

enum {
  MAX_RAILS = 16,
  MAX_WORKERS = 64,
  MAX_REQUESTS = 32, /* of a channel and direction, as NCCL has them */
  MAX_DEPTH = 32,    /* of the limits */
  MAX_OUTSTANDING = 128, /* chunks on a connection that the peer has not acknowledged */
  MAX_LOOPS = 8,
  MAX_GRANTS = 256, /* buffers that a peer may grant ahead of the messages */
  HANDLE_BYTES = 128,
  SECRET_BYTES = 32,
  NAME_BYTES = 16,
  NONCE_BYTES = 16,
  RECORD_BYTES = 32,
  WAIT = -1
};

/* ---- digest.c ---- */
void hmac_sha256(const uint8_t key[SECRET_BYTES], const void *message, size_t num_bytes, uint8_t tag[32]);
void random_bytes(void *to, size_t num_bytes);

/* ---- board.c: layout of board.py ---- */
enum { POSTED, COMPLETED, LAST_TX, LAST_RX, TX_BYTES, RX_BYTES, RX_CHUNKS, BORROWED, NUM_FIELDS };

struct board {
  int fd, row;
  uint64_t *fields; /* NULL: closed */
  int64_t rest_ns;  /* by which times are set back when nothing is under way */
  double limit_s;   /* of a wait for its lock */
  char path[1024], problem[64];
};

struct rail {
  char interface[16];
  struct sockaddr_storage address;
  socklen_t address_bytes;
  char text[INET6_ADDRSTRLEN];
  uint64_t bits_per_s; /* 0: unknown */
  int64_t hold_ns;     /* for which its owner keeps it after the last activity */
};

struct host;
bool board_open(struct board *board, const char *path, double limit_s, char *why, size_t why_bytes);
bool board_register(struct board *board, const struct host *host, char *why, size_t why_bytes);
void board_leave(struct board *board);
void board_close(struct board *board);
void board_reset_dead(struct board *board);
void board_announce(struct board *board, uint32_t rails);
void board_post(struct board *board, int rail);
void board_complete(struct board *board, int rail, size_t num_bytes);
void board_receiving(struct board *board, int rail, bool rests);
void board_received(struct board *board, int rail, size_t num_bytes);
int board_borrowed(struct board *board, int rail);
bool board_take(struct board *board, int rail, int bound); /* bound 0: none */
void board_give_back(struct board *board, int rail);
uint32_t board_idle(struct board *board, const struct host *host, int field);

/* ---- loop.c ---- */
struct watched { /* the first member of what waits for a descriptor */
  void (*on_event)(struct watched *self, uint32_t events);
  void (*release)(struct watched *self);
  int fd;
  struct watched *next_dead;
};

struct channel;
struct loop {
  pthread_t thread;
  int index, epoll_fd, wake_fd;
  atomic_bool is_asleep, ends;
  pthread_mutex_t lock;      /* of `ready` and of what channels say of it */
  struct channel *ready;     /* channels with something posted */
  struct channel *channels;  /* all channels of this loop */
  struct channel *turn;      /* that is served first next time */
  struct watched *dead;      /* released after the current events */
  int64_t next_check_ns;
  char scratch[256 * 1024];  /* for payloads that have arrived before */
};

bool loop_start(struct loop *loop, int index); /* false with errno; loop_free follows in any case */
void loop_stop(struct loop *loop);
const char *loop_add(struct loop *loop, struct watched *watched, uint32_t events); /* NULL, or why not: no memory, say */
void loop_watch(struct loop *loop, struct watched *watched, uint32_t events);      /* for other events than before */
void loop_forget(struct loop *loop, struct watched *watched, bool aborts); /* closes and, later, releases it */
int loop_detach(struct loop *loop, struct watched *watched);               /* the same, but returns the descriptor */
void loop_kick(struct channel *channel, bool closes);                      /* has its loop look at a channel */
void loop_free(struct loop *loop);
void loop_wake_waiting(void); /* loops whose channels wait for room on a rail */

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INTERNAL_ERROR = 3, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6 };

/* ---- host.c: what all channels of the process share ---- */
enum policy { FUSELINK, SPRAY, DIRECT };

struct limits {
  int chunk_bytes, direct_first, direct_depth, borrowed_per_rail, batch;
  double refresh_s, hold_s, release_s, stall_s, no_rail_s;
};

struct listen {
  struct listen *next;
  uint32_t number;
  uint8_t secret[SECRET_BYTES];
  struct channel *accepted; /* connected by peers, not yet given to NCCL */
  uint8_t (*names)[NAME_BYTES]; /* of all channels it has had: none may begin twice */
  int num_names;
};

struct listener {
  struct watched watched;
  int rail;
};

struct host {
  int worker, num_rails, num_loops, num_users, pid, query_fd, port;
  struct rail rails[MAX_RAILS];
  uint32_t direct; /* mask of the rails that this worker owns */
  enum policy policy;
  struct limits limits;
  double timeout_s;
  struct board board;
  struct loop *loops;
  struct listener *listeners[MAX_RAILS];
  struct joining *joinings; /* of loop 0: connections of peers whose handshake is under way, the newest first */
  int num_joinings;
  int64_t paused_until_ns; /* accepting, after it has failed */
  atomic_uint links;          /* mask of the rails that have a link */
  atomic_uint waiting;        /* mask of the loops whose channels wait for room on a rail */
  /* Chunks of all channels on each rail: NCCL has many, and the direct rail must not hold what idle ones could take. */
  atomic_int num_on_rail[MAX_RAILS];
  pthread_mutex_t lock;       /* of what follows */
  struct listen *listens;
  struct channel *named; /* all channels that peers may connect again */
  uint32_t num_listens;
  unsigned next_loop;
};

extern struct host *the_host;
int64_t now_ns(void);
bool host_acquire(void);
void host_release(void);
bool host_listens(char *why, size_t why_bytes);
void host_check_links(void);
bool host_defers(int rail);
double host_least_late_s(int rail);
void say_no_more(void); /* NCCL may be unloaded */
void say(bool warns, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* ---- wire ---- */
enum { DATA = 1, GRANT, ACK, TOO_LARGE, RAIL_DOWN, BYE, RECORD_MAGIC = 0xF5C1 };

struct record { /* as on the wire; all hosts are little-endian */
  uint64_t seq, size;
  uint32_t slot, mask, epoch;
  uint16_t kind, magic;
};
_Static_assert(sizeof(struct record) == RECORD_BYTES, "wire.py");

/* ---- connection.c ---- */
struct posted { /* a chunk that was given to a connection */
  uint64_t seq;
  uint32_t chunk, num_bytes;
  int64_t at_ns;
  uint64_t end;            /* bytes written to the connection at its end */
  bool is_late, is_queued; /* queued: not yet being written */
  bool has_passed;         /* it has left the network: the kernel of the peer has it, so it delays nothing on the rail */
};

struct connection {
  struct watched watched;
  struct channel *channel;
  int rail;
  uint32_t incarnation;
  struct posted outstanding[MAX_OUTSTANDING]; /* in the order in which they are written */
  int num_outstanding;
  double typical_s; /* for which a chunk is on the network */
  uint64_t num_written;
  bool wants_write, is_closed;
  uint8_t *credits; /* records that overtake chunks */
  size_t num_credits, credit_room, credits_sent;
  struct record frame; /* the chunk being written */
  size_t frame_sent;   /* bytes of record and payload; 0: none is being written */
  bool has_frame;
  uint8_t *kept; /* a copy of the frame's payload, once its memory is the caller's again */
  struct record record; /* being read */
  size_t num_header, num_payload;
  bool reads_payload;
  uint64_t num_acked; /* bytes, by the peer's kernel */
  int64_t progress_ns, drains_until_ns; /* 0: it does not close */
};

struct connection *connection_new(struct channel *channel, int fd, int rail, uint32_t incarnation);
void connection_credit(struct connection *connection, const struct record *record);
bool connection_has_output(const struct connection *connection);
const char *connection_write(struct connection *connection); /* NULL, or why it has failed */
const char *connection_read(struct connection *connection, ssize_t budget); /* the same, after so many bytes or all */
struct posted *connection_find(struct connection *connection, uint64_t seq, uint32_t chunk);
void connection_remove(struct connection *connection, struct posted *posted);
void connection_note_passed(struct connection *connection, struct posted *posted);
void connection_count_passed(struct connection *connection);
bool connection_is_stalled(struct connection *connection, int64_t now);
void connection_release_memory(struct connection *connection);
bool configure_socket(int fd, int family, bool defers);

/* ---- channel.c ---- */
enum { IS_FREE, IS_PENDING, IS_DONE, HAS_FAILED };

struct request {
  struct channel *channel;
  atomic_int state;
  int result; /* ncclResult_t of one that has failed */
  bool is_receive;
  char *data;
  size_t size; /* of the buffer; of the message once done */
};

struct outgoing { /* a message that is sent; of the loop */
  uint64_t seq;
  bool is_active, is_granted, is_too_large;
  const char *data;
  size_t size;
  uint32_t num_chunks, num_left;
  uint8_t *acked; /* for each chunk */
};

struct incoming { /* a receive that was posted */
  char *data;
  size_t size;
  int64_t num_bytes; /* -1 before the first chunk */
  uint32_t num_chunks, num_left;
  uint8_t *arrived;
};

struct attempt { /* to connect a rail */
  int64_t next_ns, limit_ns;
  uint32_t incarnation;
  bool was_connected, is_refused;
  struct joining *joining;
};

struct arrival { /* a connection that a peer has made */
  struct arrival *next;
  int fd, rail;
  uint32_t incarnation;
};

struct batch { /* chunks that are scheduled with the same knowledge */
  int left;
  int64_t end_ns;
};

struct channel {
  struct loop *loop;
  struct channel *next_ready, *next_in_loop, *next_named, *next_accepted;
  bool is_ready, closes; /* under the loop's lock */
  bool is_added;
  uint64_t id; /* random; in the handle while it is being connected */
  uint8_t name[NAME_BYTES], secret[SECRET_BYTES];
  int peer, num_rails;
  uint32_t peer_chunk_bytes;
  /* shared with NCCL's threads */
  struct request sends[MAX_REQUESTS], receives[MAX_REQUESTS];
  _Atomic uint64_t num_sends, num_receives; /* posted */
  atomic_int error;       /* ncclResult_t once it is broken */
  atomic_uint usable;     /* mask of the rails that are connected */
  _Atomic int64_t first_connected_ns;
  struct arrival *arrivals; /* under the host's lock */
  atomic_bool is_closed;
  /* of the loop */
  struct connection *connections[MAX_RAILS];
  int num_connections;
  const char *failures[MAX_RAILS];
  uint32_t idle, peer_idle, peer_epoch, epoch, idle_here;
  int num_on_rail[MAX_RAILS], borrowed[MAX_RAILS];
  struct batch sending, crediting;
  struct outgoing out[MAX_REQUESTS];
  uint64_t taken_sends, next_seq; /* of the next chunk that was never sent */
  uint32_t next_chunk;
  uint64_t granted[MAX_GRANTS]; /* 1 + bytes of buffers for messages that are not here yet */
  struct { uint64_t seq; uint32_t chunk; } *again; /* lost with their rail, or late */
  size_t again_begin, again_end, again_room;
  struct incoming in[MAX_REQUESTS];
  uint64_t first_receive, taken_receives;
  int num_begun, num_active;
  int64_t without_rail_ns, closing_ns, created_ns;
  bool was_connected, peer_said_bye;
  bool dials;
  struct sockaddr_storage peer_address[MAX_RAILS];
  struct attempt attempts[MAX_RAILS];
};

struct channel *channel_new(struct loop *loop);
void channel_free(struct channel *channel);
struct request *channel_post(struct channel *channel, bool is_receive, void *data, size_t size);
bool channel_test(struct request *request);
void channel_close(struct channel *channel); /* waits, then frees it */
/* for its loop */
void channel_step(struct channel *channel, int64_t now, int64_t *wait_ns);
void channel_check(struct channel *channel, int64_t now, uint32_t links, bool *is_busy);
void channel_ready(struct channel *channel, bool closes);
bool channel_waits(const struct channel *channel);
void channel_write(struct channel *channel);
bool channel_has_ended(const struct channel *channel);
void channel_attach(struct channel *channel, int fd, int rail, uint32_t incarnation);
void channel_drop(struct connection *connection, const char *reason, bool tells_peer);
void channel_fail(struct channel *channel, int result, const char *reason);
void channel_pump(struct channel *channel);
void channel_end(struct connection *connection, bool aborts);
/* for its connections */
void channel_on_event(struct watched *watched, uint32_t events);
char *channel_target(struct channel *channel, const struct record *record, bool *is_wanted, const char **why);
const char *channel_take(struct connection *connection, const struct record *record, bool was_wanted);
const char *channel_payload(struct channel *channel, uint64_t seq, uint32_t chunk); /* NULL: not needed any more */

/* ---- schedule.c ---- */
int schedule_choose(struct channel *channel); /* the rail of the next chunk, counted on it, or WAIT */
void schedule_completed(struct channel *channel, int rail, size_t num_bytes);
void schedule_credit(struct channel *channel, uint32_t idle, uint32_t epoch);
bool batch_is_over(const struct batch *batch);
void batch_begin(struct batch *batch);

/* ---- joining.c: handshakes, listening and dialling ---- */
bool joining_listen(struct host *host, char *why, size_t why_bytes);
void joining_check_host(struct host *host, int64_t now);
void joining_stop(struct host *host);
void joining_dial(struct channel *channel, int64_t now, uint32_t links);
void joining_give_up(struct channel *channel);
