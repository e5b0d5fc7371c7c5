/* The board of a host, in shared memory; its layout is that of board.py, version 1. */
#define _GNU_SOURCE
#include "rails.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
  VERSION = 1,
  GENERATION = 24 / 8,
  RAILS = 64, /* bytes */
  RAIL_BYTES = 64,
  WORKERS = 1088 / 8,
  CELLS = 8192 / 8,
  ROW_FIELDS = MAX_RAILS * NUM_FIELDS,
  BOARD_BYTES = 8192 + MAX_WORKERS * ROW_FIELDS * 8
};
enum { PID, START, WORKER, OWNED };
static const uint64_t UNKNOWN = UINT64_MAX;
static const double LEAVE_S = 1.0;

struct header {
  char magic[8];
  uint32_t version, num_rails, num_workers, cell_bytes;
};
static const struct header HEADER = {"FUSCORLS", VERSION, MAX_RAILS, MAX_WORKERS, NUM_FIELDS * 8};

static uint64_t get(const uint64_t *field) { return __atomic_load_n(field, __ATOMIC_RELAXED); }
static void set(uint64_t *field, uint64_t value) { __atomic_store_n(field, value, __ATOMIC_RELAXED); }
/* Threads of this process share its row; other processes only read it. */
static uint64_t add(uint64_t *field, uint64_t value) { return __atomic_add_fetch(field, value, __ATOMIC_SEQ_CST); }

static uint64_t *cell(const struct board *board, int row, int rail) {
  return board->fields + CELLS + row * ROW_FIELDS + rail * NUM_FIELDS;
}
static uint64_t *worker_row(const struct board *board, int row) { return board->fields + WORKERS + row * NUM_FIELDS; }

/* Start time of a process in clock ticks since boot; 0 if there is none, or only its remains; UNKNOWN with errno. */
static uint64_t start_time(uint64_t pid) {
  char path[64], text[1024];
  snprintf(path, sizeof path, "/proc/%llu/stat", (unsigned long long)pid);
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return errno == ENOENT ? 0 : UNKNOWN; /* such as out of descriptors */
  ssize_t n = read(fd, text, sizeof text - 1);
  int code = errno;
  close(fd);
  errno = code;
  if (n <= 0) return !n || errno == ESRCH ? 0 : UNKNOWN;
  text[n] = 0;
  char *rest = strrchr(text, ')'), state = 0;
  if (!rest) return 0;
  unsigned long long start = 0;
  /* Fields 3 (state) and 22 (start time), proc(5). */
  if (sscanf(rest + 1, " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu", &state, &start) != 2) {
    return 0;
  }
  return state == 'Z' || state == 'X' ? 0 : start;
}

static bool is_dead(const struct board *board, int row) {
  uint64_t *worker = worker_row(board, row), pid = get(worker + PID), start = pid ? start_time(pid) : UNKNOWN;
  return start != UNKNOWN && start != get(worker + START);
}

/* Lock the file for at most so long, whatever signals come; NULL, or why not. */
static const char *lock(struct board *board, double limit_s) {
  int64_t end = now_ns() + (int64_t)(1e9 * limit_s);
  while (flock(board->fd, LOCK_EX | LOCK_NB)) {
    if (errno != EWOULDBLOCK && errno != EINTR) return strerror(errno);
    if (now_ns() > end) {
      snprintf(board->problem, sizeof board->problem, "another process has held its lock for %g s", limit_s);
      return board->problem;
    }
    usleep(1000);
  }
  return NULL;
}

static void changed(struct board *board) { set(board->fields + GENERATION, get(board->fields + GENERATION) + 1); }

static void clear_row(struct board *board, int row) {
  for (int i = 0; i < ROW_FIELDS; i++) set(cell(board, row, 0) + i, 0);
}

static void free_row(struct board *board, int row) {
  set(worker_row(board, row) + PID, 0);
  clear_row(board, row);
  changed(board);
}

/* Free the rows of dead workers, under the lock; return the number of living ones. */
static int count_workers(struct board *board) {
  int num = 0;
  for (int row = 0; row < MAX_WORKERS; row++) {
    if (is_dead(board, row)) free_row(board, row);
    num += get(worker_row(board, row) + PID) != 0;
  }
  return num;
}

/* Write the header of a new file, check that of an old one; NULL or what is wrong. */
static const char *check_or_format(int fd, const struct stat *found) {
  struct header header = {0};
  static const struct header NONE = {0};
  if (found->st_uid != geteuid() || !S_ISREG(found->st_mode)) return "it belongs to another user; remove it";
  if (pread(fd, &header, sizeof header, 0) < 0) return strerror(errno);
  if (found->st_size <= BOARD_BYTES && !memcmp(&header, &NONE, sizeof header)) { /* new, or its maker was killed before it wrote the header */
    int code;
    while ((code = posix_fallocate(fd, 0, BOARD_BYTES)) == EINTR) continue;
    if (code) return strerror(code);
    return pwrite(fd, &HEADER, sizeof HEADER, 0) == (ssize_t)sizeof HEADER ? NULL : strerror(errno);
  }
  return found->st_size == BOARD_BYTES && !memcmp(&header, &HEADER, sizeof header) ? NULL : "it is not a board of rails of this version; remove it";
}

bool board_open(struct board *board, const char *path, double limit_s, char *why, size_t why_bytes) {
  struct stat found;
  board->row = -1;
  board->limit_s = limit_s;
  if (path && strlen(path) >= sizeof board->path) {
    snprintf(why, why_bytes, "the path of the board of rails has %zu bytes, more than %zu", strlen(path), sizeof board->path - 1);
    return false;
  }
  if (path) {
    strcpy(board->path, path);
  } else {
    unsigned long long network = stat("/proc/self/ns/net", &found) ? 0 : found.st_ino;
    snprintf(board->path, sizeof board->path, "/dev/shm/fusco-rails-v%d-%u-%llu", VERSION, getuid(), network);
  }
  const char *problem = NULL;
  for (;;) { /* until the file that is open was not removed meanwhile */
    board->fd = open(board->path, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
    problem = board->fd < 0 ? strerror(errno) : lock(board, limit_s);
    if (!problem && fstat(board->fd, &found)) problem = strerror(errno);
    if (problem) break;
    if (found.st_nlink) {
      problem = check_or_format(board->fd, &found);
      flock(board->fd, LOCK_UN);
      break;
    }
    close(board->fd);
  }
  if (!problem) {
    void *map = mmap(NULL, BOARD_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, board->fd, 0);
    board->fields = map == MAP_FAILED ? NULL : map;
    if (!board->fields) problem = strerror(errno);
  }
  if (problem) {
    snprintf(why, why_bytes, "cannot open the board of rails %s: %s", board->path, problem);
    if (board->fd >= 0) close(board->fd);
    board->fd = -1;
  }
  return !problem;
}

bool board_register(struct board *board, const struct host *host, char *why, size_t why_bytes) {
  uint64_t pid = (uint64_t)getpid(), start = start_time(pid);
  const char *problem = start == UNKNOWN ? strerror(errno) : lock(board, board->limit_s);
  if (problem) {
    snprintf(why, why_bytes, "cannot register on the board of rails %s: %s", board->path, problem);
    return false;
  }
  count_workers(board);
  int row = 0;
  while (row < MAX_WORKERS && get(worker_row(board, row) + PID)) row++;
  if (row < MAX_WORKERS) {
    for (int i = 0; i < host->num_rails; i++) {
      char *at = (char *)board->fields + RAILS + i * RAIL_BYTES;
      memcpy(at, host->rails[i].interface, 16);
      set((uint64_t *)(at + 16), host->rails[i].bits_per_s);
    }
    clear_row(board, row);
    uint64_t *worker = worker_row(board, row);
    set(worker + START, start);
    set(worker + WORKER, (uint64_t)host->worker);
    set(worker + OWNED, host->direct);
    set(worker + PID, pid);
    changed(board);
    board->row = row;
    double rest_s = host->limits.hold_s - host->limits.release_s;
    board->rest_ns = rest_s > 0 ? (int64_t)(1e9 * rest_s) : 0;
  } else {
    snprintf(why, why_bytes, "the board of rails %s has %d workers, the maximum", board->path, MAX_WORKERS);
  }
  flock(board->fd, LOCK_UN);
  return row < MAX_WORKERS;
}

/* Give the row back, and remove the file if it was the last; the memory stays. */
void board_leave(struct board *board) {
  if (lock(board, LEAVE_S)) { /* a row is cleared again when it is taken */
    if (board->row >= 0) set(worker_row(board, board->row) + PID, 0);
    return;
  }
  if (board->row >= 0) free_row(board, board->row);
  struct stat file, ours;
  bool is_this = !stat(board->path, &file) && !fstat(board->fd, &ours) && file.st_ino == ours.st_ino;
  if (!count_workers(board) && is_this) unlink(board->path);
  flock(board->fd, LOCK_UN);
}

void board_close(struct board *board) {
  if (!board->fields) return;
  board_leave(board);
  munmap(board->fields, BOARD_BYTES);
  close(board->fd);
  board->fields = NULL;
}

void board_reset_dead(struct board *board) {
  bool any = false;
  for (int row = 0; row < MAX_WORKERS && !any; row++) any = is_dead(board, row);
  if (any && !flock(board->fd, LOCK_EX | LOCK_NB)) { /* else another process is changing the board */
    count_workers(board);
    flock(board->fd, LOCK_UN);
  }
}

void board_announce(struct board *board, uint32_t rails) {
  for (int rail = 0; rail < MAX_RAILS; rail++) {
    if (rails >> rail & 1) set(cell(board, board->row, rail) + LAST_TX, (uint64_t)now_ns());
  }
}

void board_post(struct board *board, int rail) {
  uint64_t *mine = cell(board, board->row, rail);
  add(mine + POSTED, 1);
  set(mine + LAST_TX, (uint64_t)now_ns());
}

void board_complete(struct board *board, int rail, size_t num_bytes) {
  uint64_t *mine = cell(board, board->row, rail);
  uint64_t completed = add(mine + COMPLETED, 1);
  add(mine + TX_BYTES, num_bytes);
  set(mine + LAST_TX, (uint64_t)(now_ns() - (get(mine + POSTED) == completed ? board->rest_ns : 0)));
}

void board_receiving(struct board *board, int rail, bool rests) {
  set(cell(board, board->row, rail) + LAST_RX, (uint64_t)(now_ns() - (rests ? board->rest_ns : 0)));
}

void board_received(struct board *board, int rail, size_t num_bytes) {
  add(cell(board, board->row, rail) + RX_CHUNKS, 1);
  add(cell(board, board->row, rail) + RX_BYTES, num_bytes);
}

int board_borrowed(struct board *board, int rail) {
  uint64_t sum = 0;
  for (int row = 0; row < MAX_WORKERS; row++) {
    if (get(worker_row(board, row) + PID)) sum += __atomic_load_n(cell(board, row, rail) + BORROWED, __ATOMIC_SEQ_CST);
  }
  return (int)sum;
}

bool board_take(struct board *board, int rail, int bound) {
  uint64_t *mine = cell(board, board->row, rail) + BORROWED;
  add(mine, 1); /* visible before those of the others are read */
  if (bound && board_borrowed(board, rail) > bound) {
    add(mine, (uint64_t)-1);
    return false;
  }
  return true;
}

void board_give_back(struct board *board, int rail) { add(cell(board, board->row, rail) + BORROWED, (uint64_t)-1); }

uint32_t board_idle(struct board *board, const struct host *host, int field) {
  uint32_t all = (1u << host->num_rails) - 1, idle = all;
  int64_t now = now_ns();
  for (int row = 0; row < MAX_WORKERS; row++) {
    if (row == board->row || !get(worker_row(board, row) + PID)) continue;
    uint32_t owned = (uint32_t)get(worker_row(board, row) + OWNED) & all;
    for (int rail = 0; owned; rail++, owned >>= 1) {
      if (owned & 1 && now - (int64_t)get(cell(board, row, rail) + field) < host->rails[rail].hold_ns) idle &= ~(1u << rail);
    }
  }
  return idle;
}
