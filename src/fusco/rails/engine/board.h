/* The board: who uses which rail of this host, in shared memory that all jobs of a user share.
 *
 * A file, one for each user and network namespace, mapped by every worker. Each number has one writer, all are
 * little-endian, aligned to their size, and written by one store. Version 1:
 *
 * offset   content
 * 0        magic FUSCORLS; then, 32 bits each, version, maximum of rails, of workers, bytes of a cell
 * 24       64 bits: generation, which changes whenever a worker registers or leaves
 * 64       16 rails, 64 bytes each: interface (16 bytes, zero-padded), speed in bit/s (64 bits)
 * 1088     64 workers, 64 bytes each, 64 bits a field: pid (0: free), start time of that process (field 22 of
 *          /proc/PID/stat), worker, mask of direct rails
 * 8192     64 workers x 16 rails cells, 64 bytes each, written by that worker only: the fields below; times in nanoseconds
 *          of CLOCK_MONOTONIC. A worker with nothing under way sets its times back by hold_s - release_s, so others need
 *          to compare them with hold_s only
 *
 * Rows of workers and rails change under flock of the file. A worker that borrows a rail first counts itself, then adds
 * up the borrowed chunks of all workers, and takes its count back if they exceed the bound. All processes must be in one
 * pid namespace: rows of processes that have ended are reset.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(hidden)

enum { MAX_RAILS = 16, MAX_WORKERS = 64, NAME_LIMIT = 16, WHY_BYTES = 1536 };
/* Chunks posted and completed, last transmission and reception, bytes sent and received, chunks received, borrowed chunks
 * outstanding. */
enum { POSTED, COMPLETED, LAST_TX, LAST_RX, TX_BYTES, RX_BYTES, RX_CHUNKS, BORROWED, NUM_FIELDS };

struct board {
  uint64_t *fields; /* NULL: closed */
  int fd, row;      /* row: -1 before board_register */
  int64_t rest_ns;  /* by which times are set back when nothing is under way */
  double limit_s;   /* of a wait for its lock */
  char path[1024], pattern[1024];
};

struct named_rail {
  char interface[NAME_LIMIT];
  uint64_t bits_per_s; /* 0: unknown */
};

int64_t now_ns(void);
/* These return false after writing why, of at most WHY_BYTES. A path may be a pattern NAME.*, of which the first file that is
 * this user's is taken, or else a new one. */
bool board_open(struct board *board, const char *path, double limit_s, char *why);
bool board_follow(struct board *board, char *why); /* opens it anew if its last user has removed the file */
bool board_register(struct board *board, int worker, uint32_t direct, const struct named_rail *rails, int num_rails, char *why);
void board_leave(struct board *board); /* gives the row back, and removes the file if it was the last; the memory stays */
void board_close(struct board *board);
void board_reset_dead(struct board *board);
/* of this worker's row */
void board_announce(struct board *board, uint32_t rails, int64_t now);
void board_post(struct board *board, int rail, int num_chunks, int64_t now);
void board_complete(struct board *board, int rail, int num_chunks, size_t num_bytes, int64_t now);
void board_receiving(struct board *board, int rail, bool rests, int64_t now);
void board_received(struct board *board, int rail, size_t num_bytes);
bool board_take(struct board *board, int rail, int bound); /* bound 0: none */
void board_give_back(struct board *board, int rail, int num_chunks);
int board_borrowed_by_this(const struct board *board, int rail);
/* of all rows */
int board_borrowed(const struct board *board, int rail);
uint32_t board_idle(const struct board *board, int num_rails, const int64_t *hold_ns, int field, int64_t now);

struct completions { /* what was seen of the owners' completions, by a monitor that polls them */
  uint64_t seen[2][MAX_WORKERS][MAX_RAILS];
  int64_t next_ns[2];
  uint32_t idle[2];
};
uint32_t board_without_completions(const struct board *board, int num_rails, struct completions *last, int64_t period_ns, int field, int64_t now);

#pragma GCC visibility pop
