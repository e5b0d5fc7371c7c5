/* Copies between one GPU and pinned host memory over its PCIe link and those of idle GPUs of the host.
 *
 * A rail is one direction of one GPU's PCIe link; rail 2 k leads from GPU k to host memory, rail 2 k + 1 back. A path is
 * what this GPU needs to use a rail: streams and, if the rail belongs to another GPU, a ring of relay buffers in that
 * GPU's memory. A chunk crosses NVLink to or from its relay buffer on a stream of this GPU, and PCIe on a stream of the
 * relay, so only this GPU's context ever reads or writes the caller's tensor.
 *
 * Rails are chosen by the rule `fuselink` of rails, and workers see each other on a board like theirs.
 * The driver is a table of functions, so this file needs no headers of CUDA, and tests run it against one of their own.
 * One thread steps a mover; all other functions take its lock.
 */
#define _GNU_SOURCE
#include "schedule.h"

#include <sched.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <time.h>

enum { MAX_SLOTS = 64, MAX_STARTS = 4, NOT_READY = 600 };
enum { LONG_BYTES = 64 << 20, SPIN_BYTES = 16 << 20, TIMED_BYTES = 4 << 20 };
enum { QUEUED, STARTED, ISSUED, DONE, FAILED };

typedef struct {
    int (*set_context)(void *);
    int (*to_host)(void *, uint64_t, size_t, void *);
    int (*from_host)(uint64_t, const void *, size_t, void *);
    int (*between)(uint64_t, uint64_t, size_t, void *);
    int (*record)(void *, void *);
    int (*query)(void *);
    int (*wait)(void *, void *, unsigned);
    int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
    int64_t (*now)(void); /* null: CLOCK_MONOTONIC */
} Driver;

typedef struct {
    struct limits limits;
    void *kernel; /* copies by threads instead of copy engines */
    int64_t num_blocks, relays_by_kernel, own_link_by_kernel;
} Options;

typedef struct {
    uint64_t buffer;   /* relay buffers, one for each slot; 0: this GPU's own link */
    int64_t num_slots; /* chunks that may be under way */
    void *first_context, *first_stream, *last_context, *last_stream;
    void *first_events[MAX_SLOTS], *last_events[MAX_SLOTS];
} Streams;

typedef struct Job {
    struct Job *next;
    char *host;
    uint64_t device;
    int64_t num_bytes, num_issued, num_done, num_borrowed;
    void *start; /* event: what must be done before the copy begins */
    int32_t state, direction, error, unused;
    int64_t outstanding[MAX_RAILS]; /* by rail, chunks */
    void *last[MAX_RAILS];          /* by rail, the event of the last launch */
} Job;

typedef struct {
    int is_open; /* without, it is drained */
    Streams streams;
    int64_t count, next_slot;                                                /* chunks under way; where the next begins */
    int64_t begun_ns;                                                        /* when the first launch under way began */
    int head, num_launches;                                                  /* launches under way, each of some chunks */
    struct { Job *job; int64_t num_bytes, num_chunks; } launches[MAX_SLOTS]; /* a ring, with events of the same index */
} Path;

typedef struct {
    Driver driver;
    Options options;
    struct board *board;
    int64_t hold_ns[MAX_RAILS];
    uint32_t direct; /* mask of this GPU's two rails */
    Path paths[MAX_RAILS];
    Job *first[2], **end[2]; /* by direction */
    int64_t num_jobs, chunk_ns; /* what a chunk takes on PCIe; 0: not known */
    int error, is_running, num_waiting;
    void *context;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t thread;
} Mover;

/* The thread that steps takes the lock again and again; it lets others go first. */
static void enter(Mover *mover) {
    __atomic_add_fetch(&mover->num_waiting, 1, __ATOMIC_RELAXED);
    pthread_mutex_lock(&mover->lock);
    __atomic_sub_fetch(&mover->num_waiting, 1, __ATOMIC_RELAXED);
}

static int64_t time_of(const Mover *mover) { return mover->driver.now ? mover->driver.now() : now_ns(); }

static int take(Mover *mover, int rail) { return board_take(mover->board, rail, mover->options.limits.borrowed_per_rail); }

/* Between two launches on a link pass 3 us, so those on this GPU's own link are long, and two are under way: a relay's
 * are as long as its ring permits. A batch of one chunk is for measurements, and stays so. */
static int has_long_launches(const Mover *mover, const Path *path) { return !path->streams.buffer && mover->options.limits.batch > 1; }

/* Chunks of a job that were not launched yet. */
static int64_t chunks_left(const Mover *mover, const Job *job) {
    return (job->num_bytes - job->num_issued + mover->options.limits.chunk_bytes - 1) / mover->options.limits.chunk_bytes;
}

/* Chunks of a path that are not done, as far as the time tells: launches end as a whole, and may be long. */
static int64_t undone_on(const Mover *mover, const Path *path, int64_t now) {
    if (!path->num_launches || !mover->chunk_ns) return path->count;
    int64_t done = (now - path->begun_ns) / mover->chunk_ns, most = path->launches[path->head].num_chunks;
    return path->count - (done < most ? done : most);
}

/* Chunks that a path may take now so that all paths end together: its part of all that is not done. */
static int64_t room_of(const Mover *mover, const Job *job, int rail, int num_paths, int64_t now) {
    int64_t sum = chunks_left(mover, job);
    for (int other = job->direction; other < MAX_RAILS; other += 2) sum += undone_on(mover, &mover->paths[other], now);
    return sum / num_paths - undone_on(mover, &mover->paths[rail], now);
}

/* Chunks that a launch on a relay should have. Towards the end of a job there are fewer, so that all paths end together.
 * To host memory PCIe waits for NVLink, so the first launch is short. */
static int64_t launch_of(const Mover *mover, const Job *job, int rail, int num_paths, int64_t now) {
    const Path *path = &mover->paths[rail];
    int64_t batch = mover->options.limits.batch, left = chunks_left(mover, job), most = left / (2 * num_paths);
    int64_t room = room_of(mover, job, rail, num_paths, now), rest = batch - path->next_slot % batch;
    if (most < 2) most = left < 2 ? left : 2;
    if (!path->count && !job->direction && batch > 3) rest = batch / 4;
    if (most > rest) most = rest;
    return most < room ? most : room;
}

/* Choose a rail; `num_paths` is set to the number of those that this copy can have now, at least one. */
static int choose(Mover *mover, const Job *job, int *num_paths) {
    int direction = job->direction;
    struct view view = {.direct = mover->direct};
    int64_t now = time_of(mover);
    uint32_t idle = board_idle(mover->board, MAX_RAILS, mover->hold_ns, LAST_TX, now);
    for (int rail = direction; rail < MAX_RAILS; rail += 2) {
        if (!mover->paths[rail].is_open) continue;
        view.usable |= 1u << rail;
        view.outstanding[rail] = (int)mover->paths[rail].count;
        if (!(mover->direct >> rail & 1)) view.borrowed[rail] = board_borrowed(mover->board, rail);
    }
    view.idle = idle & view.usable & ~mover->direct;
    *num_paths = __builtin_popcount((mover->direct & view.usable) | view.idle);
    if (!*num_paths) *num_paths = 1; /* only busy links of other GPUs are left */
    int own = __builtin_ctz(mover->direct) + direction;
    const Path *path = &mover->paths[own];
    const struct limits *limits = &mover->options.limits;
    if (path->is_open && has_long_launches(mover, path)) { /* so they are counted, not their chunks */
        if (!path->num_launches) return own;
        int has_room = path->num_launches < 2 && path->streams.num_slots > 1; /* each has an event of its own */
        view.outstanding[own] = has_room ? limits->direct_first : limits->direct_depth; /* relays are filled first */
        for (int rail = direction; rail < MAX_RAILS; rail += 2) {
            const Path *relay = &mover->paths[rail];
            int64_t most = launch_of(mover, job, rail, *num_paths, now);
            /* Two launches keep a relay busy; a third of the few chunks that have just ended would be a short one. */
            if (most < 1 || (relay->num_launches > 1 && relay->streams.num_slots - relay->count < most)) view.idle &= ~(1u << rail);
        }
    }
    for (;;) {
        int rail = choose_rail(&view, FUSELINK, limits);
        if (rail == WAIT || mover->direct >> rail & 1 || take(mover, rail)) return rail;
        view.borrowed[rail] = limits->borrowed_per_rail; /* another worker was quicker */
    }
}

/* Chunks. */

static int in_context(Mover *mover, void *context) {
    if (mover->context == context) return 0;
    mover->context = context;
    return mover->driver.set_context(context);
}

static int run_kernel(Mover *mover, uint64_t to, uint64_t from, int64_t num_bytes, void *stream) {
    void *arguments[] = {&to, &from, &num_bytes};
    unsigned blocks = (unsigned)mover->options.num_blocks;
    return mover->driver.launch(mover->options.kernel, blocks, 1, 1, 512, 1, 1, 0, stream, arguments, 0);
}

static int between(Mover *mover, uint64_t to, uint64_t from, int64_t num_bytes, void *stream) {
    if (mover->options.relays_by_kernel) return run_kernel(mover, to, from, num_bytes, stream);
    return mover->driver.between(to, from, (size_t)num_bytes, stream);
}

static int over_pcie(Mover *mover, const Job *job, uint64_t device, int64_t num_bytes, void *stream) {
    char *host = job->host + job->num_issued;
    if (job->direction) return mover->driver.from_host(device, host, (size_t)num_bytes, stream);
    return mover->driver.to_host(host, device, (size_t)num_bytes, stream);
}

static int issue_direct(Mover *mover, const Job *job, const Path *path, int launch, int64_t num_bytes) {
    const Streams *streams = &path->streams;
    void *stream = streams->last_stream;
    uint64_t device = job->device + job->num_issued, host = (uint64_t)(uintptr_t)(job->host + job->num_issued);
    int error = in_context(mover, streams->last_context);
    if (!error && mover->options.own_link_by_kernel)
        error = run_kernel(mover, job->direction ? device : host, job->direction ? host : device, num_bytes, stream);
    else if (!error)
        error = over_pcie(mover, job, device, num_bytes, stream);
    return error ? error : mover->driver.record(streams->last_events[launch], stream);
}

static int issue_relayed(Mover *mover, const Job *job, const Path *path, int launch, int64_t num_bytes) {
    const Driver *driver = &mover->driver;
    const Streams *streams = &path->streams;
    void *first = streams->first_stream, *last = streams->last_stream;
    uint64_t buffer = streams->buffer + (uint64_t)(path->next_slot * mover->options.limits.chunk_bytes);
    uint64_t device = job->device + job->num_issued;
    int error = in_context(mover, streams->first_context);
    if (!error)
        error = job->direction ? over_pcie(mover, job, buffer, num_bytes, first)
                               : between(mover, buffer, device, num_bytes, first);
    if (!error) error = driver->record(streams->first_events[launch], first);
    if (!error) error = in_context(mover, streams->last_context);
    if (!error) error = driver->wait(last, streams->first_events[launch], 0);
    if (!error)
        error = job->direction ? between(mover, device, buffer, num_bytes, last)
                               : over_pcie(mover, job, buffer, num_bytes, last);
    return error ? error : driver->record(streams->last_events[launch], last);
}

/* The chunks that one launch takes: one has been chosen, more follow if the rail has room for them now. */
static int64_t batch_of(Mover *mover, const Job *job, int rail, int num_paths) {
    const Options *options = &mover->options;
    const Path *path = &mover->paths[rail];
    int64_t now = time_of(mover), left = chunks_left(mover, job), batch = 1;
    if (path->streams.buffer) {
        int64_t most = launch_of(mover, job, rail, num_paths, now), slots = path->streams.num_slots - path->next_slot;
        while (batch < most && batch < slots && take(mover, rail)) batch++;
        return batch;
    }
    if (!has_long_launches(mover, path)) return 1;
    int64_t longest = LONG_BYTES / options->limits.chunk_bytes, most = left / (2 * num_paths);
    int64_t room = room_of(mover, job, rail, num_paths, now);
    if (room > options->limits.direct_first) room = options->limits.direct_first; /* more is left to whichever path ends first */
    if (most < room) most = room;
    if (num_paths == 1 || most > left) most = left;
    if (most > longest) most = longest;
    return most < 1 ? 1 : most;
}

static int issue(Mover *mover, Job *job, int rail, int num_paths) {
    Path *path = &mover->paths[rail];
    int launch = (int)((path->head + path->num_launches) % path->streams.num_slots);
    int64_t left = job->num_bytes - job->num_issued, num_chunks = batch_of(mover, job, rail, num_paths);
    int64_t num_bytes = num_chunks * mover->options.limits.chunk_bytes;
    if (num_bytes > left) num_bytes = left;
    board_post(mover->board, rail, (int)num_chunks, time_of(mover));
    path->launches[launch].job = job, path->launches[launch].num_bytes = num_bytes;
    path->launches[launch].num_chunks = num_chunks;
    if (!path->num_launches) path->begun_ns = time_of(mover);
    path->num_launches++, path->count += num_chunks;
    job->outstanding[rail] += num_chunks, job->last[rail] = path->streams.last_events[launch];
    int error = path->streams.buffer ? issue_relayed(mover, job, path, launch, num_bytes)
                                  : issue_direct(mover, job, path, launch, num_bytes);
    path->next_slot = (path->next_slot + num_chunks) % path->streams.num_slots;
    job->num_issued += num_bytes;
    if (path->streams.buffer) job->num_borrowed += num_bytes;
    if (job->num_issued == job->num_bytes) __atomic_store_n(&job->state, ISSUED, __ATOMIC_RELEASE);
    return error;
}

static void complete(Mover *mover, int rail) {
    Path *path = &mover->paths[rail];
    Job *job = path->launches[path->head].job;
    int64_t now = time_of(mover), num_bytes = path->launches[path->head].num_bytes, num_chunks = path->launches[path->head].num_chunks;
    if (num_bytes >= TIMED_BYTES) mover->chunk_ns = (now - path->begun_ns) / num_chunks;
    path->begun_ns = now;
    path->head = (int)((path->head + 1) % path->streams.num_slots), path->num_launches--, path->count -= num_chunks;
    if (path->streams.buffer) board_give_back(mover->board, rail, (int)num_chunks);
    board_complete(mover->board, rail, (int)num_chunks, (size_t)num_bytes, now);
    job->outstanding[rail] -= num_chunks;
    job->num_done += num_bytes;
    if (job->num_done == job->num_bytes) __atomic_store_n(&job->state, DONE, __ATOMIC_RELEASE);
}

static void fail(Mover *mover, int error) {
    mover->error = error;
    for (int direction = 0; direction < 2; direction++)
        for (Job *job = mover->first[direction]; job; job = job->next)
            if (job->state < DONE) job->state = FAILED, job->error = error;
    for (int rail = 0; rail < MAX_RAILS; rail++) { /* what the driver still has of them is unknown */
        if (mover->paths[rail].streams.buffer) board_give_back(mover->board, rail, board_borrowed_by_this(mover->board, rail));
        mover->paths[rail].count = mover->paths[rail].num_launches = 0;
    }
}

static int poll_paths(Mover *mover) {
    int progress = 0;
    for (int rail = 0; rail < MAX_RAILS; rail++) {
        Path *path = &mover->paths[rail];
        while (path->num_launches) {
            int answer = mover->driver.query(path->streams.last_events[path->head]);
            if (answer == NOT_READY) break;
            if (answer) return fail(mover, answer), 1;
            complete(mover, rail), progress = 1;
        }
    }
    return progress;
}

/* Take finished jobs from a queue: their memory is the caller's, who may free it after the lock is released. */
static void drop_finished(Mover *mover, int direction) {
    Job **place = &mover->first[direction];
    while (*place)
        if ((*place)->state >= DONE)
            *place = (*place)->next, mover->num_jobs--;
        else
            place = &(*place)->next;
    mover->end[direction] = place;
}

static int pump(Mover *mover, int direction) {
    int progress = 0, num_starts = 0;
    for (Job *job = mover->first[direction]; job && !mover->error; job = job->next) {
        if (job->state == QUEUED) {
            int answer = num_starts++ < MAX_STARTS ? mover->driver.query(job->start) : NOT_READY;
            if (answer == NOT_READY) continue;
            if (answer) return fail(mover, answer), 1;
            job->state = STARTED, progress = 1;
        }
        while (job->state == STARTED) {
            int num_paths = 0, rail = choose(mover, job, &num_paths);
            if (rail == WAIT) return progress;
            int error = issue(mover, job, rail, num_paths);
            if (error) return fail(mover, error), 1;
            progress = 1;
        }
    }
    return progress;
}

int fusco_step(Mover *mover) {
    pthread_mutex_lock(&mover->lock);
    mover->context = 0; /* whatever is current in this thread */
    int progress = 0;
    if (!mover->error) {
        progress = poll_paths(mover);
        for (int direction = 0; direction < 2; direction++) progress |= pump(mover, direction);
    }
    for (int direction = 0; direction < 2; direction++) drop_finished(mover, direction);
    pthread_mutex_unlock(&mover->lock);
    return progress;
}

static void *run(void *argument) {
    Mover *mover = argument;
    struct timespec rest = {0, 20000};
    int64_t last = time_of(mover);
    prctl(PR_SET_TIMERSLACK, 1UL);
    while (__atomic_load_n(&mover->is_running, __ATOMIC_RELAXED)) {
        if (fusco_step(mover)) {
            last = time_of(mover);
            continue;
        }
        int64_t waited = time_of(mover) - last;
        pthread_mutex_lock(&mover->lock);
        if (!mover->num_jobs && waited > 200000) /* the next copy often follows at once */
            while (!mover->num_jobs && mover->is_running) pthread_cond_wait(&mover->changed, &mover->lock);
        pthread_mutex_unlock(&mover->lock);
        if (waited > 2000000) nanosleep(&rest, 0); /* what is waited for may take long: other work of the stream */
        for (int64_t end = now_ns() + 1500; now_ns() < end;) {} /* the driver has other callers */
        while (__atomic_load_n(&mover->num_waiting, __ATOMIC_RELAXED)) sched_yield();
    }
    return 0;
}

/* For Python. */

Mover *fusco_new(const Driver *driver, const Options *options, struct board *board, uint32_t direct) {
    Mover *mover = calloc(1, sizeof *mover);
    if (!mover) return 0;
    mover->driver = *driver, mover->options = *options, mover->board = board;
    mover->direct = direct;
    for (int rail = 0; rail < MAX_RAILS; rail++) mover->hold_ns[rail] = (int64_t)(1e9 * options->limits.hold_s);
    for (int direction = 0; direction < 2; direction++) mover->end[direction] = &mover->first[direction];
    pthread_mutex_init(&mover->lock, 0);
    pthread_cond_init(&mover->changed, 0);
    return mover;
}

int fusco_start(Mover *mover) {
    mover->is_running = 1;
    int error = pthread_create(&mover->thread, 0, run, mover);
    if (error) mover->is_running = 0;
    return error;
}

void fusco_free(Mover *mover) {
    enter(mover);
    int was_running = mover->is_running;
    __atomic_store_n(&mover->is_running, 0, __ATOMIC_RELAXED);
    pthread_cond_broadcast(&mover->changed);
    pthread_mutex_unlock(&mover->lock);
    if (was_running) pthread_join(mover->thread, 0);
    pthread_mutex_destroy(&mover->lock);
    pthread_cond_destroy(&mover->changed);
    free(mover);
}

void fusco_open_path(Mover *mover, int64_t rail, const Streams *streams) {
    enter(mover);
    Path *path = &mover->paths[rail];
    path->streams = *streams, path->count = path->next_slot = 0, path->head = path->num_launches = 0, path->is_open = 1;
    pthread_mutex_unlock(&mover->lock);
}

/* Begin to drain a path, or go on; return its chunks under way. */
int64_t fusco_drain_path(Mover *mover, int64_t rail) {
    enter(mover);
    mover->paths[rail].is_open = 0;
    int64_t count = mover->paths[rail].count;
    pthread_mutex_unlock(&mover->lock);
    return count;
}

void fusco_submit(Mover *mover, Job *job) {
    enter(mover);
    if (mover->error || !job->num_bytes) {
        job->state = mover->error ? FAILED : DONE, job->error = mover->error;
    } else {
        *mover->end[job->direction] = job, mover->end[job->direction] = &job->next;
        mover->num_jobs++;
    }
    pthread_cond_broadcast(&mover->changed);
    pthread_mutex_unlock(&mover->lock);
}

/* Wait until a job has reached a state, at most so long; return its state. To be woken takes as long as a few MB: while
 * more is left, sleep for less than that takes, then look all the time. */
int fusco_wait(Mover *mover, const Job *job, int state, int64_t timeout_ns) {
    int64_t begin = now_ns();
    for (;;) {
        int reached = __atomic_load_n(&job->state, __ATOMIC_ACQUIRE);
        int64_t waited = now_ns() - begin;
        if (reached >= state || waited >= timeout_ns) break;
        int64_t left = job->num_bytes - (state == DONE ? job->num_done : job->num_issued) - SPIN_BYTES;
        if (reached == QUEUED) left = waited > 2000000 ? 20 << 20 : 0;
        struct timespec pause = {0, left > (100 << 20) ? 500000 : (long)(left / 210)}; /* 210 GB/s: several links */
        if (left > 0)
            nanosleep(&pause, 0);
        else
            sched_yield();
    }
    enter(mover); /* the mover has nothing of a finished job any more */
    int reached = job->state;
    pthread_mutex_unlock(&mover->lock);
    return reached;
}

/* Have a stream wait for an issued job: for the last launch on each path, which is in order. */
int fusco_order(Mover *mover, const Job *job, void *stream) {
    int error = 0;
    enter(mover);
    for (int rail = 0; rail < MAX_RAILS && !error; rail++)
        if (job->outstanding[rail]) error = mover->driver.wait(stream, job->last[rail], 0);
    pthread_mutex_unlock(&mover->lock);
    return error;
}
