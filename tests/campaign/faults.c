/* Faults of a machine, for whatever has this library preloaded; it reads at each call what to do.

   FAULT_UNDER    folder whose files are concerned
   FAULT_FULL_AT  from this write on (counted in each process; a fork goes on counting) the disk is full
   FAULT_SLOW_US  microseconds that each write takes longer
   FAULT_CLOCK_S  seconds by which the wall clock jumps
   FAULT_AFTER_MS milliseconds of a process after which it does
*/
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static long count;

static long setting(const char *name) {
  const char *text = getenv(name);
  return text ? atol(text) : 0;
}

static int concerned(const char *path) {
  const char *under = getenv("FAULT_UNDER");
  return under && path && !strncmp(path, under, strlen(under));
}

/* Return whether this write must fail; wait for as long as it takes. */
static int fails(const char *path) {
  long full = setting("FAULT_FULL_AT"), slow = setting("FAULT_SLOW_US");
  if ((!full && !slow) || !concerned(path)) return 0;
  if (slow) usleep(slow);
  if (!full || __sync_add_and_fetch(&count, 1) < full) return 0;
  errno = ENOSPC;
  return 1;
}

static int fails_at(int file) {
  char link[64], path[4096];
  if (!getenv("FAULT_UNDER")) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return fails(path);
}

ssize_t write(int file, const void *data, size_t size) {
  return fails_at(file) ? -1 : REAL(write)(file, data, size);
}

ssize_t writev(int file, const struct iovec *parts, int number) {
  return fails_at(file) ? -1 : REAL(writev)(file, parts, number);
}

ssize_t pwrite(int file, const void *data, size_t size, off_t at) {
  return fails_at(file) ? -1 : REAL(pwrite)(file, data, size, at);
}

ssize_t pwrite64(int file, const void *data, size_t size, off64_t at) {
  return fails_at(file) ? -1 : REAL(pwrite64)(file, data, size, at);
}

int fsync(int file) { return fails_at(file) ? -1 : REAL(fsync)(file); }

int ftruncate64(int file, off64_t size) { return fails_at(file) ? -1 : REAL(ftruncate64)(file, size); }

int mkdir(const char *path, mode_t mode) { return fails(path) ? -1 : REAL(mkdir)(path, mode); }

int rename(const char *from, const char *to) { return fails(to) ? -1 : REAL(rename)(from, to); }

int open64(const char *path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  mode_t mode = flags & O_CREAT ? va_arg(more, mode_t) : 0;
  va_end(more);
  return flags & O_CREAT && fails(path) ? -1 : REAL(open64)(path, flags, mode);
}

/* -- the wall clock */

static long jump(void) {
  static struct timespec begun;
  static pid_t owner;
  long seconds = setting("FAULT_CLOCK_S");
  if (!seconds) return 0;
  struct timespec now;
  REAL(clock_gettime)(CLOCK_MONOTONIC, &now);
  if (owner != getpid()) {
    begun = now;
    owner = getpid();
  }
  long passed = (now.tv_sec - begun.tv_sec) * 1000 + (now.tv_nsec - begun.tv_nsec) / 1000000;
  return passed < setting("FAULT_AFTER_MS") ? 0 : seconds;
}

int clock_gettime(clockid_t clock, struct timespec *time) {
  int result = REAL(clock_gettime)(clock, time);
  if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) time->tv_sec += jump();
  return result;
}

int gettimeofday(struct timeval *time, void *zone) {
  int result = REAL(gettimeofday)(time, zone);
  if (!result) time->tv_sec += jump();
  return result;
}

time_t time(time_t *result) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (result) *result = now.tv_sec;
  return now.tv_sec;
}

/* a deadline of the jumped clock is one of the kernel's, as it would be if that had jumped */
int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *end) {
  struct timespec real = *end;
  real.tv_sec -= jump();
  return REAL(pthread_cond_timedwait)(condition, mutex, &real);
}
