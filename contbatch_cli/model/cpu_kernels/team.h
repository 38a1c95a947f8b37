/* A team of threads for one call, taken from the OpenMP runtime that the process already has.
 *
 * The runtime's entry points come in as pointers, so that this library links to none: a second runtime would bring a second pool,
 * and two pools spin against each other. Without pointers everything runs on the calling thread.
 *
 * Within the call, phases follow each other with a barrier between. A phase is a number of items; each thread begins with its own
 * contiguous share and then takes what others have left. */
#ifndef CONTBATCH_TEAM_H
#define CONTBATCH_TEAM_H

#include <sched.h>
#include <stdatomic.h>

#define MAX_THREADS 256
#define MAX_PHASES 12

typedef void (*parallel_function)(void (*)(void *), void *, unsigned, unsigned);
typedef int (*integer_function)(void);

static parallel_function omp_parallel;
static integer_function omp_thread_num, omp_num_threads;

typedef struct {
    _Atomic int taken;
    char padding[60];
} Share;

typedef struct {
    _Atomic int arrived;
    char padding_a[60];
    _Atomic int round;
    char padding_b[60];
    Share shares[MAX_PHASES][MAX_THREADS];
    int num_threads; /* asked for; `Worker.num_threads` is what was given */
    void (*body)(void *worker, void *argument);
    void *argument;
} Team;

typedef struct {
    Team *team;
    int index, num_threads, phase;
} Worker;

ALWAYS_INLINE void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* All threads have arrived; what they wrote before is seen by all. Yields when others need the processor. */
static void barrier(Worker *worker) {
    worker->phase++;
    if (worker->num_threads == 1) return;
    Team *team = worker->team;
    int round = atomic_load_explicit(&team->round, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&team->arrived, 1, memory_order_acq_rel) == worker->num_threads - 1) {
        atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&team->round, round + 1, memory_order_release);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&team->round, memory_order_acquire) == round; spins++) {
        if (spins < 4000) relax();
        else sched_yield();
    }
}

ALWAYS_INLINE int share_start(int num_items, int index, int num_threads) {
    return (int)((int64_t)num_items * index / num_threads);
}

/* The next item of the phase's `num_items`, or -1. `victim` begins as 0 and belongs to the calling loop. */
static int next_item(Worker *worker, int num_items, int *victim) {
    for (; *victim < worker->num_threads; ++*victim) {
        int owner = (worker->index + *victim) % worker->num_threads;
        int start = share_start(num_items, owner, worker->num_threads);
        int size = share_start(num_items, owner + 1, worker->num_threads) - start;
        _Atomic int *taken = &worker->team->shares[worker->phase][owner].taken;
        if (atomic_load_explicit(taken, memory_order_relaxed) >= size) continue;
        int item = atomic_fetch_add_explicit(taken, 1, memory_order_relaxed);
        if (item < size) return start + item;
    }
    return -1;
}

static void team_member(void *team_pointer) {
    Team *team = team_pointer;
    Worker worker = {team, 0, 1, 0};
    if (omp_parallel) {
        worker.index = omp_thread_num();
        worker.num_threads = omp_num_threads();
    }
    team->body(&worker, team->argument);
}

/* Run `body` on up to `num_threads` threads. One call at a time: the caller holds the library's lock. */
static void team_run(Team *team, int num_threads, int num_phases, void (*body)(void *, void *), void *argument) {
    num_threads = num_threads < 1 ? 1 : num_threads > MAX_THREADS ? MAX_THREADS : num_threads;
    for (int phase = 0; phase < num_phases; phase++)
        for (int i = 0; i < num_threads; i++) atomic_store_explicit(&team->shares[phase][i].taken, 0, memory_order_relaxed);
    atomic_store(&team->arrived, 0);
    team->body = body;
    team->argument = argument;
    if (num_threads > 1 && omp_parallel) {
        omp_parallel(team_member, team, (unsigned)num_threads, 0);
    } else {
        Worker worker = {team, 0, 1, 0};
        body(&worker, argument);
    }
}

#endif
