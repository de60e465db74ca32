/* The threads that kernels run in.

   They are torch's own OpenMP threads where these are GNU's: they are warm, and threads of another pool would have to
   wait for cores on which these spin. Otherwise threads are made for the call, for which the work must be larger. */

#include "cpu.h"
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <time.h>

/* glibc 2.34 gave these new versions. By their first ones, which it keeps, a module that is built there runs from glibc
   2.27 on. */
#if defined(__GLIBC__) && defined(__x86_64__)
#define FIRST_GLIBC "GLIBC_2.2.5"
#elif defined(__GLIBC__) && defined(__aarch64__)
#define FIRST_GLIBC "GLIBC_2.17"
#endif
#ifdef FIRST_GLIBC
__asm__(".symver dlopen, dlopen@" FIRST_GLIBC);
__asm__(".symver dlsym, dlsym@" FIRST_GLIBC);
__asm__(".symver pthread_create, pthread_create@" FIRST_GLIBC);
__asm__(".symver pthread_join, pthread_join@" FIRST_GLIBC);
#endif

#define MAX_THREADS 256
#define SPIN 20000 /* looks for the others, some 30 us, before a thread lets some other run, which may be one of them */
#define SECOND 1000000000LL /* ns */
#define GRACE 100000        /* ns that a thread of a call may be late: to wake it takes some 50 us */
#define WATCHED 100         /* us: calls that take less are not watched, which takes some 3 us */
#define CREDIT 5000000      /* ns that may be lost after a long time without a loss; swept: 2, 5, 15 ms */
#define PRICE 80            /* one part in so many of the time may be lost by tries of more threads; swept: 20 to 80 */
#define SAVED 50000000      /* ns that a team may lose of what it has gained before pauses are long; not swept */
#define REST 4              /* until then: the pause, in times of what was lost; not swept */
#define LONGEST (5 * SECOND) /* without a try */
#define TURN 5000000        /* ns that recorded calls keep Python's lock: as long as Python's own code does */
#define WORTH 4 /* us: what takes less is done sooner by one thread than threads that stay can begin; not swept */

static void (*gomp_parallel)(void (*)(void *), void *, unsigned, unsigned);
static int (*gomp_threads)(void), (*gomp_number)(void); /* of the team that the caller is in, and of the caller */
static int fine_clock; /* whether a thread's own clock tells of microseconds; in some sandboxes it goes by ticks */

static int64_t clock_ns(clockid_t clock) {
    struct timespec at;
    clock_gettime(clock, &at);
    return at.tv_sec * SECOND + at.tv_nsec;
}

int has_openmp(void) { return gomp_parallel != NULL; }
int can_adapt(void) { return gomp_parallel && fine_clock; }
static void forget_openmp(void) { gomp_parallel = NULL; }
void find_threads(void) {
    int64_t before = 0, now, steps = 0;
    for (int i = 0; i < 32; i++, before = now) steps += (now = clock_ns(CLOCK_THREAD_CPUTIME_ID)) != before;
    fine_clock = steps > 16;
    void *gomp = dlopen("libgomp.so.1", RTLD_NOLOAD | RTLD_LAZY); /* only if torch has brought it */
    if (gomp) *(void **)&gomp_threads = dlsym(gomp, "omp_get_num_threads");
    if (gomp_threads) *(void **)&gomp_number = dlsym(gomp, "omp_get_thread_num");
    if (gomp_number) *(void **)&gomp_parallel = dlsym(gomp, "GOMP_parallel");
    pthread_atfork(NULL, NULL, forget_openmp); /* a child has none of OpenMP's threads, and would wait for them */
}

static void *enter(void *job) {
    void **pair = job;
    ((void (*)(void *))pair[0])(pair[1]);
    return NULL;
}
/* size: told how many threads there are, before the calling one works. */
static void run_threads(void (*work)(void *), void *data, int64_t threads, int64_t *size) {
    pthread_t made[MAX_THREADS];
    int count = 0;
    void *job[2] = {(void *)work, data};
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    while (count < threads - 1 && !pthread_create(&made[count], NULL, enter, job)) count++;
    __atomic_store_n(size, count + 1, __ATOMIC_RELEASE);
    work(data);
    while (count) pthread_join(made[--count], NULL);
}

/* -- Python's lock ------------------------------------------------------------------------------------------------- */

/* Of recorded calls. Whoever gives the lock away gets it back when the other thread of Python ends its turn, some ms
   later, and a stage has hundreds of calls. So it is kept for as long as Python's own code would keep it. */
typedef struct {
    int64_t end, waited; /* end: of the turn, by the clock; waited: ns for the lock */
} Turn;
static __thread Turn *turn; /* NULL: the lock is given away around each call */

static void begin_turn(Turn *t) { t->end = clock_ns(CLOCK_MONOTONIC) + TURN; }
PyThreadState *release_gil(void) {
    return turn && clock_ns(CLOCK_MONOTONIC) < turn->end ? NULL : PyEval_SaveThread();
}
void take_gil(PyThreadState *released) {
    if (!released) return;
    const int64_t before = turn ? clock_ns(CLOCK_MONOTONIC) : 0;
    PyEval_RestoreThread(released);
    if (!turn) return;
    begin_turn(turn);
    turn->waited += turn->end - TURN - before;
}

/* -- how many ------------------------------------------------------------------------------------------------------ */

/* A call that is watched. A thread of it never sleeps but for Python's lock, so its own time falls behind the clock's
   only while it has no processor: others have that, or a quota is spent. All the others wait for it where they meet.
   While the first one waits for the lock, nobody waits for any other. When all have ended their work the first one may
   wait still: another one that looks for the next call has its processor. */
typedef struct {
    void (*work)(void *);
    void *data;
    const int64_t *pinned;
    const Turn *turn; /* of the first thread, or NULL */
    int64_t begin, end, away, missing; /* end: of the last one's work, away: ns, of the thread that was longest, missing:
                                          threads that were away */
} Watched;

/* Binds the calling thread to a processor, once. */
static void stay_on(int processor) {
    static __thread int bound = -1;
    if (bound == processor) return;
    bound = processor;
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET(processor, &only);
    sched_setaffinity(0, sizeof only, &only); /* where it fails, it runs elsewhere */
}

static void raise_to(int64_t *most, int64_t value) {
    int64_t before = __atomic_load_n(most, __ATOMIC_RELAXED);
    while (value > before)
        if (__atomic_compare_exchange_n(most, &before, value, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) break;
}
static int64_t waited(const Watched *w) { return w->turn ? w->turn->waited : 0; }
static void watch(void *data) {
    Watched *w = data;
    const int me = w->pinned ? gomp_number() : 0; /* the caller, 0, stays where its process may run */
    if (me) stay_on((int)w->pinned[me]);
    const int64_t ran = clock_ns(CLOCK_THREAD_CPUTIME_ID);
    w->work(w->data);
    const int64_t now = clock_ns(CLOCK_MONOTONIC);
    const int64_t away = now - w->begin - waited(w) - (clock_ns(CLOCK_THREAD_CPUTIME_ID) - ran) - GRACE;
    raise_to(&w->end, now);
    raise_to(&w->away, away);
    if (away > 0) take(&w->missing, 1);
}

/* How many threads the next call has: fewer than there are as long as a pause lasts. */
static int64_t threads_now(Workers *w) {
    if (!w) return 1;
    if (!w->fixed && w->active < w->most && clock_ns(CLOCK_MONOTONIC) - w->since >= w->pause) {
        w->active = w->most;
        w->credit = 0;
    }
    return w->active;
}

/* Learns from a call. What n threads do more than one less pays for time in which all wait for one: 1 / n of the time
   that they run. Once more is lost the next calls run without those that were away. What ends by itself, as most does
   that takes a processor for a moment, is paid by what was gained before: a short pause is enough. Of a program that
   stays, tries have nothing but one part in `PRICE` of the time. */
static void learn(Workers *w, const Watched *call, int64_t threads) {
    if (w->fixed || !fine_clock) return;
    const int64_t now = clock_ns(CLOCK_MONOTONIC), took = now - call->begin - waited(call);
    const int64_t lost = call->away + most(now - call->end - GRACE, 0);
    const int64_t gain = (took - lost) / threads;
    w->credit = least(w->credit + gain - lost, CREDIT);
    w->saved += gain / 2 - lost; /* half: bound by memory, two threads are 1.3 times as fast */
    if (w->credit < 0) w->saved += (now - w->since) / PRICE;
    w->saved = most(least(w->saved, SAVED), -LONGEST / PRICE); /* without a pause, too: it could sink for long */
    if (w->credit >= 0) return;
    w->pause = least(most(-w->saved * PRICE, -w->credit * REST), LONGEST);
    w->active = threads - call->missing > 1 ? threads - (call->missing ? call->missing : 1) : 1;
    w->since = now;
    w->credit = 0;
}
static void run_gomp(void (*work)(void *), void *data, Workers *w, int64_t threads) {
    /* What a stage that began in one thread has waited before is none of this call's. */
    const int64_t begin = clock_ns(CLOCK_MONOTONIC) - (turn ? turn->waited : 0);
    Watched call = {.work = work, .data = data, .pinned = w->pinned, .turn = turn, .begin = begin};
    gomp_parallel(watch, &call, (unsigned)threads, 0);
    learn(w, &call, threads);
}

/* -- threads that stay for several calls --------------------------------------------------------------------------- */

/* The first thread makes the calls; the others wait for the work of each, and fetch what it will read. */
typedef struct {
    void (*calls)(void *);
    void *data;
    const int64_t *coming; /* the GEMM that comes next, where it has told */
    Fetched own;
    char apart[64]; /* what threads wait for has lines of its own */
    void (*work)(void *);
    void *job;
    const int64_t *next; /* the GEMM that comes after it */
    int64_t begun;       /* jobs */
    char apart_too[64];
    int64_t ended; /* by each thread but the first */
} Region;
static __thread Region *region; /* whose first thread this is */

void tell_weight(const int64_t *gemm) {
    if (region) region->coming = gemm;
}
static void look_ahead(Fetched *f, const int64_t *gemm, int64_t number, int64_t size) {
    const Member me = {.number = number, .size = size};
    if (gemm != f->gemm) *f = (Fetched){gemm, gemm ? weight_ahead(gemm, &me) : (Ahead){0}};
}
void await_count(const int64_t *count, int64_t value, Ahead *next) {
    for (int64_t turn = 0; __atomic_load_n(count, __ATOMIC_ACQUIRE) < value; turn++) {
        fetch(next, 2);
        if (turn > SPIN) sched_yield();
    }
}
static void begin(Region *r, void (*work)(void *), void *job) {
    r->work = work;
    r->job = job;
    r->next = r->coming;
    __atomic_store_n(&r->begun, r->begun + 1, __ATOMIC_RELEASE);
}
static void stay(void *data) {
    Region *r = data;
    const int number = gomp_number(), size = gomp_threads();
    if (!number) {
        region = r;
        r->calls(r->data);
        region = NULL;
        begin(r, NULL, NULL);
        return;
    }
    Fetched own = {0};
    for (int64_t job = 1;; job++) {
        await_count(&r->begun, job, &own.next);
        if (!r->work) return;
        r->work(r->job);
        look_ahead(&own, r->next, number, size); /* before it ends: the first thread changes that then */
        __atomic_add_fetch(&r->ended, 1, __ATOMIC_RELEASE);
    }
}
static void run_in_region(void (*work)(void *), void *data) {
    Region *r = region;
    const int size = gomp_threads();
    begin(r, work, data);
    work(data);
    look_ahead(&r->own, r->next, 0, size);
    await_count(&r->ended, r->begun * (size - 1), &r->own.next);
}
void run_together(void (*calls)(void *), void *data, Workers *workers) {
    const int64_t threads = threads_now(workers);
    Region r = {.calls = calls, .data = data};
    Turn own = {0};
    begin_turn(&own);
    turn = &own;
    if (threads > 1 && gomp_parallel) run_gomp(stay, &r, workers, threads);
    else calls(data);
    turn = NULL;
}

void run(void (*work)(void *), void *data, Workers *workers, int64_t cost) {
    int64_t size;
    if (region && workers && cost >= WORTH) {
        run_in_region(work, data);
        return;
    }
    const int64_t threads = region ? 1 : threads_now(workers);
    if (threads <= 1 || cost < (gomp_parallel ? 8 : 200)) work(data);
    else if (!gomp_parallel) run_threads(work, data, threads, &size);
    else if (cost < WATCHED) gomp_parallel(work, data, (unsigned)threads, 0);
    else run_gomp(work, data, workers, threads);
}

void run_team(void (*work)(void *), void *data, Team *team, Workers *workers) {
    if (region && workers) {
        run_in_region(work, data); /* see `join` */
        return;
    }
    const int64_t threads = threads_now(workers);
    if (threads > 1 && gomp_parallel) run_gomp(work, data, workers, threads); /* or fewer: see `join` */
    else run_threads(work, data, threads, &team->size);
}
void run_unlocked(void (*work)(void *), void *data, Workers *workers, int64_t cost) {
    RELEASE_GIL
    run(work, data, workers, cost);
    TAKE_GIL
}
void run_team_unlocked(void (*work)(void *), void *data, Team *team, Workers *workers) {
    RELEASE_GIL
    run_team(work, data, team, workers);
    TAKE_GIL
}
Member join(Team *team) {
    Member me = {.team = team};
    while (!(me.size = __atomic_load_n(&team->size, __ATOMIC_ACQUIRE)))
        if (gomp_parallel) __atomic_store_n(&team->size, gomp_threads(), __ATOMIC_RELEASE);
        else sched_yield();
    /* OpenMP's numbers, so that a thread has the share of a weight that it has fetched, and had in the step before. */
    if (me.size > 1) me.number = gomp_parallel ? gomp_number() : take(&team->entered, 1);
    return me;
}
void meet(const Member *me, Ahead *next) {
    Team *team = me->team;
    const int64_t round = __atomic_load_n(&team->round, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&team->arrived, 1, __ATOMIC_ACQ_REL) == me->size) {
        __atomic_store_n(&team->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&team->round, round + 1, __ATOMIC_RELEASE);
        return;
    }
    await_count(&team->round, round + 1, next);
}

