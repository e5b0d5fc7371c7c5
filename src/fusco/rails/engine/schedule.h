/* The choice of a rail for each chunk (FuseLink, section 4.3.2). Sets of rails are bit masks: bit i is rail i. */
#pragma once

#include "board.h"

#include <pthread.h>
#include <stdatomic.h>

#pragma GCC visibility push(hidden)

enum { WAIT = -1 }; /* no rail may take a chunk now */
enum rule { FUSELINK, SPRAY, DIRECT };
enum bound { OF_RAIL, OF_WORKER, UNBOUNDED };
enum monitor { BY_ACTIVITY, BY_COMPLETION };

struct limits { /* fusco.rails.Limits */
  int chunk_bytes, direct_first, direct_depth, borrowed_per_rail, batch;
  double refresh_s, hold_s, release_s, stall_s, no_rail_s;
};

struct policy { /* fusco.rails.Policy */
  int rule, bound, monitor, defers, heeds_receiver, refreshes;
};

struct view { /* a channel's rails when a chunk is scheduled */
  uint32_t direct;            /* rails that the sender owns */
  uint32_t usable;            /* rails with a connection to the peer */
  uint32_t idle;              /* rails idle on both hosts; indirect rails outside it are busy */
  int outstanding[MAX_RAILS]; /* chunks of this sender on each rail */
  int borrowed[MAX_RAILS];    /* borrowed chunks on each rail that count towards the bound */
};

int choose_rail(const struct view *view, enum rule rule, const struct limits *limits);

struct sharing { /* what the schedulers of a worker have in common */
  struct board board;
  struct limits limits;
  struct policy policy;
  int num_rails;
  uint32_t direct;              /* mask of the rails that this worker owns */
  int64_t hold_ns[MAX_RAILS];   /* for which an owner keeps its rail after the last activity */
  bool counts_all;              /* a rail's depth is that of all channels together, as NCCL has many of them */
  atomic_int num_on_rail[MAX_RAILS];
  struct completions completions;
  pthread_mutex_t lock;         /* of the completions */
};

struct batch { /* chunks that are scheduled with the same knowledge (FuseLink, section 4.4) */
  int left;
  int64_t end_ns;
};

struct scheduler { /* of a channel */
  struct sharing *sharing;
  struct view view;
  uint32_t peer_idle, peer_epoch; /* of the newest credit */
  uint32_t idle_here, epoch;      /* for the credits of this end */
  struct batch sending, crediting;
};

void scheduler_init(struct scheduler *scheduler, struct sharing *sharing);
int scheduler_next(struct scheduler *scheduler); /* the rail of the next chunk, counted on it, or WAIT */
uint32_t scheduler_busy(struct scheduler *scheduler); /* indirect rails that their owners use, while a direct one works */
void scheduler_completed(struct scheduler *scheduler, int rail, size_t num_bytes); /* 0 bytes: it was lost or taken back */
bool scheduler_gave_back(void); /* whether this thread has completed any since the last call */
void scheduler_credit(struct scheduler *scheduler, uint32_t idle, uint32_t epoch);
void scheduler_stamp(struct scheduler *scheduler, uint32_t *idle, uint32_t *epoch); /* what the next credit carries */

#pragma GCC visibility pop
