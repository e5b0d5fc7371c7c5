/* The board of a host, in shared memory. */
#define _GNU_SOURCE
#include "board.h"

#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
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

int64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000ll + now.tv_nsec;
}

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

/* Lock the file for at most so long, whatever signals come; false with why not. */
static bool lock(struct board *board, double limit_s, char *why) {
  int64_t end = now_ns() + (int64_t)(1e9 * limit_s);
  while (flock(board->fd, LOCK_EX | LOCK_NB)) {
    if (errno != EWOULDBLOCK && errno != EINTR) {
      snprintf(why, WHY_BYTES, "cannot lock the board of rails %s: %s", board->path, strerror(errno));
      return false;
    }
    if (now_ns() > end) {
      snprintf(why, WHY_BYTES, "another process has held the lock of the board of rails %s for %g s: fuser %s shows those that have it open",
               board->path, limit_s, board->path);
      return false;
    }
    usleep(1000);
  }
  return true;
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

static bool is_ours(const struct stat *file) { return file->st_uid == geteuid() && S_ISREG(file->st_mode); }

/* Write the header of a new file, check that of an old one; NULL or what is wrong. */
static const char *check_or_format(int fd, const struct stat *found) {
  struct header header = {0};
  static const struct header NONE = {0};
  if (pread(fd, &header, sizeof header, 0) < 0) return strerror(errno);
  if (found->st_size <= BOARD_BYTES && !memcmp(&header, &NONE, sizeof header)) { /* new, or its maker was killed before it wrote the header */
    int code;
    while ((code = posix_fallocate(fd, 0, BOARD_BYTES)) == EINTR) continue;
    if (code) return strerror(code);
    return pwrite(fd, &HEADER, sizeof HEADER, 0) == (ssize_t)sizeof HEADER ? NULL : strerror(errno);
  }
  return found->st_size == BOARD_BYTES && !memcmp(&header, &HEADER, sizeof header) ? NULL : "it is not a board of rails of version 1; remove it";
}

/* Of the files of a pattern NAME.*, choose the first that is this user's, or else the first of NAME.0, NAME.1, ... that does
 * not exist. Any user may make files in the folder, so names may be taken. */
static void choose_path(struct board *board) {
  struct stat file;
  glob_t found;
  *board->path = 0;
  if (!glob(board->pattern, 0, NULL, &found)) { /* sorted */
    for (size_t i = 0; i < found.gl_pathc && !*board->path; i++) {
      const char *path = found.gl_pathv[i];
      if (strlen(path) < sizeof board->path && !lstat(path, &file) && is_ours(&file)) strcpy(board->path, path);
    }
    globfree(&found);
  }
  int num_bytes = (int)strlen(board->pattern) - 1;
  for (unsigned i = 0; !*board->path || (i && !lstat(board->path, &file) && !is_ours(&file)); i++) {
    snprintf(board->path, sizeof board->path, "%.*s%u", num_bytes, board->pattern, i);
  }
}

/* Open the file, which must be this user's, lock and map it; false with why not. */
static bool open_locked(struct board *board, char *why) {
  struct stat found;
  const char *problem = NULL;
  for (int64_t end = now_ns() + (int64_t)(1e9 * board->limit_s);;) { /* until the file was not removed, or taken by another user, meanwhile */
    if (*board->pattern) choose_path(board);
    board->fd = open(board->path, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
    problem = board->fd < 0 || fstat(board->fd, &found) ? strerror(errno) : is_ours(&found) ? NULL : "it belongs to another user; remove it";
    if (problem) {
      if (board->fd >= 0) close(board->fd);
      if (*board->pattern && !lstat(board->path, &found) && !is_ours(&found) && now_ns() < end) continue;
      break;
    }
    if (!lock(board, board->limit_s, why)) {
      close(board->fd);
      board->fd = -1;
      return false;
    }
    if (fstat(board->fd, &found)) problem = strerror(errno);
    if (!problem && !found.st_nlink) {
      close(board->fd);
      continue;
    }
    if (!problem) problem = check_or_format(board->fd, &found);
    void *map = problem ? MAP_FAILED : mmap(NULL, BOARD_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, board->fd, 0);
    if (!problem && map == MAP_FAILED) problem = strerror(errno);
    if (!problem) board->fields = map;
    if (problem) close(board->fd); /* and with it its lock */
    break;
  }
  if (!problem) return true;
  board->fd = -1;
  snprintf(why, WHY_BYTES, "cannot open the board of rails %s: %s", board->path, problem);
  return false;
}

static bool is_linked(const struct board *board) {
  struct stat ours;
  return fstat(board->fd, &ours) || ours.st_nlink;
}

static void unmap(struct board *board) {
  munmap(board->fields, BOARD_BYTES);
  close(board->fd);
  board->fields = NULL;
}

bool board_open(struct board *board, const char *path, double limit_s, char *why) {
  *board = (struct board){.row = -1, .fd = -1, .limit_s = limit_s};
  if (strlen(path) >= sizeof board->path) {
    snprintf(why, WHY_BYTES, "the path of the board of rails has %zu bytes, more than %zu", strlen(path), sizeof board->path - 1);
    return false;
  }
  size_t num_bytes = strlen(path);
  strcpy(num_bytes > 2 && !strcmp(path + num_bytes - 2, ".*") ? board->pattern : board->path, path);
  if (!open_locked(board, why)) return false;
  flock(board->fd, LOCK_UN);
  return true;
}

bool board_follow(struct board *board, char *why) {
  if (is_linked(board)) return true;
  unmap(board);
  if (!open_locked(board, why)) return false;
  flock(board->fd, LOCK_UN);
  return true;
}

bool board_register(struct board *board, int worker, uint32_t direct, const struct named_rail *rails, int num_rails, char *why) {
  uint64_t pid = (uint64_t)getpid(), start = start_time(pid);
  if (start == UNKNOWN) {
    snprintf(why, WHY_BYTES, "cannot register on the board of rails %s: %s", board->path, strerror(errno));
    return false;
  }
  if (!lock(board, board->limit_s, why)) return false;
  if (!is_linked(board)) { /* its last user has left since it was opened */
    unmap(board);
    if (!open_locked(board, why)) return false;
  }
  count_workers(board);
  int row = 0;
  while (row < MAX_WORKERS && get(worker_row(board, row) + PID)) row++;
  if (row < MAX_WORKERS) {
    for (int i = 0; i < num_rails; i++) memcpy((char *)board->fields + RAILS + i * RAIL_BYTES, rails + i, sizeof *rails);
    clear_row(board, row);
    uint64_t *fields = worker_row(board, row);
    set(fields + START, start);
    set(fields + WORKER, (uint64_t)worker);
    set(fields + OWNED, direct);
    set(fields + PID, pid);
    changed(board);
    board->row = row;
  } else {
    snprintf(why, WHY_BYTES, "the board of rails %s has %d workers, the maximum", board->path, MAX_WORKERS);
  }
  flock(board->fd, LOCK_UN);
  return row < MAX_WORKERS;
}

void board_leave(struct board *board) {
  char why[WHY_BYTES];
  if (!lock(board, LEAVE_S, why)) { /* a row is cleared again when it is taken */
    if (board->row >= 0) set(worker_row(board, board->row) + PID, 0);
    board->row = -1;
    return;
  }
  if (board->row >= 0) free_row(board, board->row);
  board->row = -1;
  struct stat file, ours;
  bool is_this = !stat(board->path, &file) && !fstat(board->fd, &ours) && file.st_ino == ours.st_ino;
  if (!count_workers(board) && is_this) unlink(board->path);
  flock(board->fd, LOCK_UN);
}

void board_close(struct board *board) {
  if (!board->fields) return;
  board_leave(board);
  unmap(board);
}

void board_reset_dead(struct board *board) {
  bool any = false;
  for (int row = 0; row < MAX_WORKERS && !any; row++) any = is_dead(board, row);
  if (any && !flock(board->fd, LOCK_EX | LOCK_NB)) { /* else another process is changing the board */
    count_workers(board);
    flock(board->fd, LOCK_UN);
  }
}

void board_announce(struct board *board, uint32_t rails, int64_t now) {
  for (int rail = 0; rail < MAX_RAILS; rail++) {
    if (rails >> rail & 1) set(cell(board, board->row, rail) + LAST_TX, (uint64_t)now);
  }
}

void board_post(struct board *board, int rail, int num_chunks, int64_t now) {
  uint64_t *mine = cell(board, board->row, rail);
  add(mine + POSTED, (uint64_t)num_chunks);
  set(mine + LAST_TX, (uint64_t)now);
}

void board_complete(struct board *board, int rail, int num_chunks, size_t num_bytes, int64_t now) {
  uint64_t *mine = cell(board, board->row, rail);
  uint64_t completed = add(mine + COMPLETED, (uint64_t)num_chunks);
  add(mine + TX_BYTES, num_bytes);
  set(mine + LAST_TX, (uint64_t)(now - (get(mine + POSTED) == completed ? board->rest_ns : 0)));
}

void board_receiving(struct board *board, int rail, bool rests, int64_t now) {
  set(cell(board, board->row, rail) + LAST_RX, (uint64_t)(now - (rests ? board->rest_ns : 0)));
}

void board_received(struct board *board, int rail, size_t num_bytes) {
  add(cell(board, board->row, rail) + RX_CHUNKS, 1);
  add(cell(board, board->row, rail) + RX_BYTES, num_bytes);
}

int board_borrowed_by_this(const struct board *board, int rail) { return (int)get(cell(board, board->row, rail) + BORROWED); }

int board_borrowed(const struct board *board, int rail) {
  uint64_t sum = 0;
  for (int row = 0; row < MAX_WORKERS; row++) {
    if (get(worker_row(board, row) + PID)) sum += __atomic_load_n(cell(board, row, rail) + BORROWED, __ATOMIC_SEQ_CST);
  }
  return (int)sum;
}

/* Workers that take the last ones at the same time may all be refused, and try again; never do more than `bound` succeed. */
bool board_take(struct board *board, int rail, int bound) {
  uint64_t *mine = cell(board, board->row, rail) + BORROWED;
  add(mine, 1); /* visible before those of the others are read */
  if (bound && board_borrowed(board, rail) > bound) {
    add(mine, (uint64_t)-1);
    return false;
  }
  return true;
}

void board_give_back(struct board *board, int rail, int num_chunks) { add(cell(board, board->row, rail) + BORROWED, (uint64_t)-num_chunks); }

/* The rails that other workers own, by row; 0 for rows without one. */
static uint32_t owned_by(const struct board *board, int row, int num_rails) {
  if (row == board->row || !get(worker_row(board, row) + PID)) return 0;
  return (uint32_t)get(worker_row(board, row) + OWNED) & ((1u << num_rails) - 1);
}

/* A rail is busy for `hold_ns` after its owner last posted, completed or received anything on it. */
uint32_t board_idle(const struct board *board, int num_rails, const int64_t *hold_ns, int field, int64_t now) {
  uint32_t idle = (1u << num_rails) - 1;
  for (int row = 0; row < MAX_WORKERS; row++) {
    uint32_t owned = owned_by(board, row, num_rails);
    for (int rail = 0; owned; rail++, owned >>= 1) {
      if (owned & 1 && now - (int64_t)get(cell(board, row, rail) + field) < hold_ns[rail]) idle &= ~(1u << rail);
    }
  }
  return idle;
}

/* As FuseLink has it: a rail is busy if its owner has completed anything on it since the last poll. Polls are at least a
 * period apart; between, the last answer holds. An owner's first chunk goes unnoticed until it completes. */
uint32_t board_without_completions(const struct board *board, int num_rails, struct completions *last, int64_t period_ns, int field, int64_t now) {
  int way = field == RX_CHUNKS;
  if (now < last->next_ns[way]) return last->idle[way];
  last->next_ns[way] = now + period_ns;
  last->idle[way] = (1u << num_rails) - 1;
  for (int row = 0; row < MAX_WORKERS; row++) {
    uint32_t owned = owned_by(board, row, num_rails);
    for (int rail = 0; owned; rail++, owned >>= 1) {
      uint64_t count = get(cell(board, row, rail) + field);
      if (!(owned & 1) || last->seen[way][row][rail] == count) continue;
      last->seen[way][row][rail] = count;
      last->idle[way] &= ~(1u << rail);
    }
  }
  return last->idle[way];
}
