#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <time.h>

#define MOST 64            /* helpers */
#define AWAKE 200000       /* nanoseconds that a helper waits before it sleeps */
#define LOOKS 64           /* between two looks at the clock */
#define PATIENT_RUNS 3     /* that are mostly waiting, one after another: then the machine is busy, and the caller works alone */
#define ALONE 10000000     /* nanoseconds that it does so the first time; twice as many when nothing has changed */
#define LONGEST_ALONE 640000000
#if defined(__x86_64__)    /* looks after which another thread may have the core: a pause is much longer there */
#define PATIENCE 256
#else
#define PATIENCE 4096
#endif

static pthread_mutex_t busy = PTHREAD_MUTEX_INITIALIZER, lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static _Atomic uint32_t latest; /* number of the latest job */
static _Atomic int left, sleeping;
static _Atomic int64_t waited; /* nanoseconds of a run that a thread has waited beyond PATIENCE */
static int64_t alone_until, alone_for = ALONE;
static int helpers, watching_forks, slow_runs;
static Job job;
static void *context;

static inline void pause_briefly(void) {
#if defined(__aarch64__)
    __asm__ volatile("isb");
#elif defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static void wait_for_job(uint32_t seen) {
    for (int64_t until = now() + AWAKE; now() < until;)
        for (int i = 0; i < LOOKS; i++, pause_briefly())
            if (atomic_load_explicit(&latest, memory_order_acquire) != seen) return;
    pthread_mutex_lock(&lock);
    atomic_fetch_add(&sleeping, 1);
    while (atomic_load(&latest) == seen) pthread_cond_wait(&wake, &lock);
    atomic_fetch_sub(&sleeping, 1);
    pthread_mutex_unlock(&lock);
}

static void *help(void *unused) {
    (void)unused;
    for (uint32_t seen = atomic_load(&latest);; seen++) { /* the thread that started this one, or a job, waits for this */
        atomic_fetch_sub_explicit(&left, 1, memory_order_release);
        wait_for_job(seen);
        job(context, helpers + 1);
    }
    return NULL;
}

/* One poll of a waiting thread; `since` is the time when PATIENCE ended, or 0. */
static inline void wait_on(int64_t looks, int64_t *since) {
    pause_briefly();
    if (looks % PATIENCE != 0) return;
    if (!*since) *since = now();
    sched_yield();
}

static inline void note_wait(int64_t since) {
    if (since) atomic_fetch_add_explicit(&waited, now() - since, memory_order_relaxed);
}

static void wait_for_helpers(void) {
    int64_t since = 0;
    for (int64_t looks = 1; atomic_load_explicit(&left, memory_order_acquire) > 0; looks++) wait_on(looks, &since);
    note_wait(since);
}

/* If other programs use the cores, the threads mostly wait for each other. One thread computes the same result. */
static void judge(int64_t begun) {
    int64_t end = now();
    if (2 * atomic_load_explicit(&waited, memory_order_relaxed) < end - begun) {
        slow_runs = 0, alone_for = ALONE;
    } else if (++slow_runs >= PATIENT_RUNS) {
        slow_runs = PATIENT_RUNS - 1; /* one more slow run after the pause is enough */
        alone_until = end + alone_for;
        alone_for = alone_for < LONGEST_ALONE ? 2 * alone_for : LONGEST_ALONE;
    }
}

/* A child process has no helpers. */
static void start_again(void) {
    helpers = 0;
    pthread_mutex_init(&busy, NULL);
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&wake, NULL);
    atomic_store(&sleeping, 0);
}

static void start_helpers(int wanted) {
    if (!watching_forks) watching_forks = pthread_atfork(NULL, NULL, start_again) == 0;
    while (helpers < wanted && helpers < MOST) {
        pthread_t thread;
        atomic_store(&left, 1);
        if (pthread_create(&thread, NULL, help, NULL) != 0) { /* no thread waits for this one */
            atomic_store(&left, 0);
            return;
        }
        pthread_detach(thread);
        wait_for_helpers();
        helpers++;
    }
}

void run_together(Job work, void *with, int workers) {
    if (workers <= 1 || pthread_mutex_trylock(&busy) != 0) {
        work(with, 1);
        return;
    }
    int64_t begun = now();
    if (begun < alone_until) {
        work(with, 1);
        pthread_mutex_unlock(&busy);
        return;
    }
    atomic_store_explicit(&waited, 0, memory_order_relaxed);
    if (helpers < workers - 1) start_helpers(workers - 1);
    if (helpers > 0) {
        job = work, context = with;
        atomic_store(&left, helpers);
        atomic_fetch_add(&latest, 1);
        if (atomic_load(&sleeping) > 0) {
            pthread_mutex_lock(&lock);
            pthread_cond_broadcast(&wake);
            pthread_mutex_unlock(&lock);
        }
    }
    work(with, helpers + 1);
    wait_for_helpers();
    judge(begun);
    pthread_mutex_unlock(&busy);
}

void meet(Meeting *meeting, int workers) {
    int round = atomic_load_explicit(&meeting->round, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&meeting->arrived, 1, memory_order_acq_rel) == workers - 1) {
        atomic_store_explicit(&meeting->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&meeting->taken, 0, memory_order_relaxed);
        atomic_store_explicit(&meeting->round, round + 1, memory_order_release);
        return;
    }
    int64_t since = 0;
    for (int64_t looks = 1; atomic_load_explicit(&meeting->round, memory_order_acquire) == round; looks++) wait_on(looks, &since);
    note_wait(since);
}
