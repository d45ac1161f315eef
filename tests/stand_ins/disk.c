/* A disk that fails, for tests: preloaded, it counts the calls that touch one folder, and fails, cuts short or kills at
   the n-th, or writes down what every call changed. See disk.py. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NOTHING, FAIL, SHORT, SIGNAL, SIGNAL_AFTER };

/* Shared with whoever runs the test, and by all processes of a run. */
struct plan {
  int64_t count, at, action, error, kinds, pid, log, hit;
  char root[1024], call[64];
};

static struct plan *plan;
static size_t root_length;
static int log_file = -1;

__attribute__((constructor)) static void begin(void) {
  const char *file = getenv("TXL_DISK_PLAN"), *log = getenv("TXL_DISK_LOG");
  int fd = file ? open(file, O_RDWR | O_CLOEXEC) : -1;
  if (fd < 0) return;
  void *shared = mmap(NULL, sizeof *plan, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (shared == MAP_FAILED) return;
  if (log) log_file = open(log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  plan = shared;
  root_length = strlen(plan->root);
}

static int under(const char *path) {
  return plan && !strncmp(path, plan->root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

/* The absolute path of what a call names. */
static int whole(int folder, const char *path, char *out) {
  if (!path) return 0;
  if (path[0] == '/') return snprintf(out, PATH_MAX, "%s", path) < PATH_MAX;
  char place[64], base[PATH_MAX];
  snprintf(place, sizeof place, folder == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", folder);
  ssize_t n = readlink(place, base, sizeof base - 1);
  if (n < 0) return 0;
  base[n] = 0;
  return snprintf(out, PATH_MAX, *path ? "%s/%s" : "%s%s", base, path) < PATH_MAX;
}

static int of_descriptor(int fd, char *out) {
  char place[64];
  snprintf(place, sizeof place, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(place, out, PATH_MAX - 1);
  if (n < 0) return 0;
  out[n] = 0;
  return 1;
}

/* 1 where the call has to fail (errno is set), 2 where it is to be cut short. A signal may not return. */
static int due(int kind, const char *call, const char *path, int *after) {
  *after = 0;
  if (!plan || !path || !under(path) || !(plan->kinds >> kind & 1)) return 0;
  int64_t number = __atomic_add_fetch(&plan->count, 1, __ATOMIC_SEQ_CST);
  if (number != plan->at) return 0;
  snprintf(plan->call, sizeof plan->call, "%s %s", call, strlen(path) > root_length ? path + root_length + 1 : ".");
  plan->hit = 1;
  switch (plan->action) {
    case FAIL: errno = (int)plan->error; return 1;
    case SHORT: return 2;
    case SIGNAL: kill(plan->pid ? (pid_t)plan->pid : getpid(), (int)plan->error); return 0;
    case SIGNAL_AFTER: *after = 1; return 0;
  }
  return 0;
}

static void afterwards(int after) {
  if (after) kill(plan->pid ? (pid_t)plan->pid : getpid(), (int)plan->error);
}

/* One record: a line of JSON without quotes to escape (tests choose names), then the data. */
static void note(const char *what, uint64_t inode, const char *path, const char *to, int64_t offset, const void *data,
                 size_t size) {
  if (log_file < 0 || !plan->log) return;
  char head[2 * PATH_MAX + 200];
  int n = snprintf(head, sizeof head, "{\"what\":\"%s\",\"inode\":%llu,\"path\":\"%s\",\"to\":\"%s\",\"offset\":%lld,\"size\":%zu}\n",
                   what, (unsigned long long)inode, path, to, (long long)offset, size);
  struct iovec parts[2] = {{head, n}, {(void *)data, data ? size : 0}};
  syscall(SYS_writev, log_file, parts, 2);
}

static uint64_t inode_of(int fd) {
  struct stat found;
  return syscall(SYS_fstat, fd, &found) ? 0 : found.st_ino;
}

static int there(const char *path) {
  struct stat found;
  return !syscall(SYS_newfstatat, AT_FDCWD, path, &found, AT_SYMLINK_NOFOLLOW);
}

static uint64_t inode_at(const char *path) {
  struct stat found;
  return syscall(SYS_newfstatat, AT_FDCWD, path, &found, AT_SYMLINK_NOFOLLOW) ? 0 : found.st_ino;
}

enum { OPEN, WRITE, SYNC, RENAME, MKDIR, UNLINK, RMDIR, MMAP, TRUNCATE, CHMOD, LINK, STAT, READ_OPEN, LIST, CLOSE };

#define REAL(name, type, ...) static type (*real)(__VA_ARGS__); \
  if (!real) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

static int opened(int folder, const char *path, int flags, mode_t mode, const char *name) {
  char at[PATH_MAX];
  int mine = plan && whole(folder, path, at) && under(at), after = 0;
  int writes = (flags & O_ACCMODE) != O_RDONLY || flags & (O_CREAT | O_TRUNC);
  if (mine && due(writes ? OPEN : READ_OPEN, name, at, &after) == 1) return -1;
  int new = mine && flags & O_CREAT && !there(at);
  int fd = (int)syscall(SYS_openat, folder, path, flags, mode);
  int said = errno;
  if (mine && fd >= 0) {
    if (new) note("create", inode_of(fd), at, "", 0, NULL, 0);
    else if (flags & O_TRUNC) note("truncate", inode_of(fd), at, "", 0, NULL, 0);
    else note("open", inode_of(fd), at, "", 0, NULL, 0);
    afterwards(after);
  }
  errno = said;
  return fd;
}

#define MODE mode_t mode = 0; if (flags & (O_CREAT | O_TMPFILE)) { va_list more; va_start(more, flags); mode = va_arg(more, mode_t); va_end(more); }
int open(const char *path, int flags, ...) { MODE return opened(AT_FDCWD, path, flags, mode, "open"); }
int open64(const char *path, int flags, ...) { MODE return opened(AT_FDCWD, path, flags, mode, "open"); }
int openat(int folder, const char *path, int flags, ...) { MODE return opened(folder, path, flags, mode, "open"); }
int openat64(int folder, const char *path, int flags, ...) { MODE return opened(folder, path, flags, mode, "open"); }
int creat(const char *path, mode_t mode) { return opened(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode, "open"); }

static FILE *stream(const char *path, const char *how, const char *symbol) {
  REAL(symbol, FILE *, const char *, const char *);
  char at[PATH_MAX];
  int after = 0, mine = plan && whole(AT_FDCWD, path, at) && under(at);
  if (mine && due(how[0] == 'r' && !strchr(how, '+') ? READ_OPEN : OPEN, "fopen", at, &after) == 1) return NULL;
  FILE *file = real(path, how);
  afterwards(after);
  return file;
}
FILE *fopen(const char *path, const char *how) { return stream(path, how, "fopen"); }
FILE *fopen64(const char *path, const char *how) { return stream(path, how, "fopen64"); }

static ssize_t written(int fd, const void *data, size_t size, int64_t offset) {
  char at[PATH_MAX];
  int mine = plan && of_descriptor(fd, at) && under(at), after = 0;
  int what = mine ? due(WRITE, "write", at, &after) : 0;
  if (what == 1) return -1;
  if (what == 2 && size > 1) size /= 2;
  int64_t from = 0;
  if (mine) from = offset >= 0 ? offset : lseek(fd, 0, fcntl(fd, F_GETFL) & O_APPEND ? SEEK_END : SEEK_CUR);
  ssize_t done = offset >= 0 ? syscall(SYS_pwrite64, fd, data, size, offset) : syscall(SYS_write, fd, data, size);
  int said = errno;
  if (mine && done > 0) note("write", inode_of(fd), at, "", from, data, (size_t)done);
  afterwards(after);
  errno = said;
  return done;
}
ssize_t write(int fd, const void *data, size_t size) { return written(fd, data, size, -1); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return written(fd, data, size, at); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) { return written(fd, data, size, at); }
ssize_t writev(int fd, const struct iovec *parts, int count) {
  char at[PATH_MAX];
  if (!plan || !of_descriptor(fd, at) || !under(at)) return syscall(SYS_writev, fd, parts, count);
  ssize_t all = 0;
  for (int i = 0; i < count; i++) {
    ssize_t done = parts[i].iov_len ? written(fd, parts[i].iov_base, parts[i].iov_len, -1) : 0;
    if (done < 0) return all ? all : -1;
    all += done;
    if ((size_t)done < parts[i].iov_len) break;
  }
  return all;
}

/* A call that a descriptor, a path or two paths are given to, and that returns 0 or -1. */
#define ON_DESCRIPTOR(kind, name, fd, call, noted) do { \
    char at[PATH_MAX]; int after = 0, mine = plan && of_descriptor(fd, at) && under(at); \
    if (mine && due(kind, name, at, &after) == 1) return -1; \
    int done = (int)(call), said = errno; \
    if (mine && !done) { noted; } \
    afterwards(after); errno = said; return done; } while (0)
#define ON_PATH(kind, name, folder, path, call, noted) do { \
    char at[PATH_MAX]; int after = 0, mine = plan && whole(folder, path, at) && under(at); \
    if (mine && due(kind, name, at, &after) == 1) return -1; \
    uint64_t inode = mine ? inode_at(at) : 0; (void)inode; \
    int done = (int)(call), said = errno; \
    if (mine && !done) { noted; } \
    afterwards(after); errno = said; return done; } while (0)

int fsync(int fd) { ON_DESCRIPTOR(SYNC, "fsync", fd, syscall(SYS_fsync, fd), note("sync", inode_of(fd), at, "", 0, NULL, 0)); }
int fdatasync(int fd) { ON_DESCRIPTOR(SYNC, "fdatasync", fd, syscall(SYS_fdatasync, fd), note("sync", inode_of(fd), at, "", 0, NULL, 0)); }
int ftruncate(int fd, off_t size) { ON_DESCRIPTOR(TRUNCATE, "ftruncate", fd, syscall(SYS_ftruncate, fd, size), note("truncate", inode_of(fd), at, "", size, NULL, 0)); }
int ftruncate64(int fd, off64_t size) { ON_DESCRIPTOR(TRUNCATE, "ftruncate", fd, syscall(SYS_ftruncate, fd, size), note("truncate", inode_of(fd), at, "", size, NULL, 0)); }
int fchmod(int fd, mode_t mode) { ON_DESCRIPTOR(CHMOD, "fchmod", fd, syscall(SYS_fchmod, fd, mode), (void)0); }

int chmod(const char *path, mode_t mode) { ON_PATH(CHMOD, "chmod", AT_FDCWD, path, syscall(SYS_fchmodat, AT_FDCWD, path, mode), (void)0); }
int fchmodat(int folder, const char *path, mode_t mode, int flags) { ON_PATH(CHMOD, "chmod", folder, path, syscall(SYS_fchmodat, folder, path, mode), (void)flags); }
int mkdir(const char *path, mode_t mode) { ON_PATH(MKDIR, "mkdir", AT_FDCWD, path, syscall(SYS_mkdirat, AT_FDCWD, path, mode), note("mkdir", inode_at(at), at, "", 0, NULL, 0)); }
int mkdirat(int folder, const char *path, mode_t mode) { ON_PATH(MKDIR, "mkdir", folder, path, syscall(SYS_mkdirat, folder, path, mode), note("mkdir", inode_at(at), at, "", 0, NULL, 0)); }
int unlink(const char *path) { ON_PATH(UNLINK, "unlink", AT_FDCWD, path, syscall(SYS_unlinkat, AT_FDCWD, path, 0), note("unlink", inode, at, "", 0, NULL, 0)); }
int rmdir(const char *path) { ON_PATH(RMDIR, "rmdir", AT_FDCWD, path, syscall(SYS_unlinkat, AT_FDCWD, path, AT_REMOVEDIR), note("unlink", inode, at, "", 0, NULL, 0)); }
int unlinkat(int folder, const char *path, int flags) { ON_PATH(flags & AT_REMOVEDIR ? RMDIR : UNLINK, "unlink", folder, path, syscall(SYS_unlinkat, folder, path, flags), note("unlink", inode, at, "", 0, NULL, 0)); }
int symlink(const char *to, const char *path) { ON_PATH(LINK, "symlink", AT_FDCWD, path, syscall(SYS_symlinkat, to, AT_FDCWD, path), note("symlink", inode_at(at), at, to, 0, NULL, 0)); }
int link(const char *from, const char *path) { ON_PATH(LINK, "link", AT_FDCWD, path, syscall(SYS_linkat, AT_FDCWD, from, AT_FDCWD, path, 0), note("link", inode_at(at), at, from, 0, NULL, 0)); }
int linkat(int folder, const char *from, int to, const char *path, int flags) { ON_PATH(LINK, "link", to, path, syscall(SYS_linkat, folder, from, to, path, flags), note("link", inode_at(at), at, from, 0, NULL, 0)); }

static int renamed(int folder, const char *from, int other, const char *to, unsigned flags) {
  char first[PATH_MAX], second[PATH_MAX];
  int mine = plan && whole(folder, from, first) && whole(other, to, second) && under(first), after = 0;
  if (mine && due(RENAME, flags ? "exchange" : "rename", first, &after) == 1) return -1;
  uint64_t inode = mine ? inode_at(first) : 0;
  int done = (int)syscall(SYS_renameat2, folder, from, other, to, flags), said = errno;
  if (mine && !done) note(flags ? "exchange" : "rename", inode, first, second, 0, NULL, 0);
  afterwards(after);
  errno = said;
  return done;
}
int rename(const char *from, const char *to) { return renamed(AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int folder, const char *from, int other, const char *to) { return renamed(folder, from, other, to, 0); }
int renameat2(int folder, const char *from, int other, const char *to, unsigned flags) { return renamed(folder, from, other, to, flags); }

void *mmap(void *where, size_t size, int rights, int flags, int fd, off_t offset) {
  char at[PATH_MAX];
  int after = 0;
  if (plan && fd >= 0 && of_descriptor(fd, at) && under(at)) {
    if (due(MMAP, "mmap", at, &after) == 1) return MAP_FAILED;
    if (flags & MAP_SHARED && rights & PROT_WRITE) note("shared", inode_of(fd), at, "", 0, NULL, 0);
  }
  void *done = (void *)syscall(SYS_mmap, where, size, rights, flags, fd, offset);
  afterwards(after);
  return done;
}
void *mmap64(void *where, size_t size, int rights, int flags, int fd, off64_t offset) { return mmap(where, size, rights, flags, fd, offset); }

int stat(const char *path, struct stat *found) { ON_PATH(STAT, "stat", AT_FDCWD, path, syscall(SYS_newfstatat, AT_FDCWD, path, found, 0), (void)0); }
int lstat(const char *path, struct stat *found) { ON_PATH(STAT, "lstat", AT_FDCWD, path, syscall(SYS_newfstatat, AT_FDCWD, path, found, AT_SYMLINK_NOFOLLOW), (void)0); }
int fstat(int fd, struct stat *found) { ON_DESCRIPTOR(STAT, "fstat", fd, syscall(SYS_fstat, fd, found), (void)0); }
int fstatat(int folder, const char *path, struct stat *found, int flags) { ON_PATH(STAT, "stat", folder, path, syscall(SYS_newfstatat, folder, path, found, flags), (void)0); }
int stat64(const char *path, struct stat64 *found) { return stat(path, (struct stat *)found); }
int lstat64(const char *path, struct stat64 *found) { return lstat(path, (struct stat *)found); }
int fstat64(int fd, struct stat64 *found) { return fstat(fd, (struct stat *)found); }
int fstatat64(int folder, const char *path, struct stat64 *found, int flags) { return fstatat(folder, path, (struct stat *)found, flags); }
int statx(int folder, const char *restrict path, int flags, unsigned mask, struct statx *restrict found) { ON_PATH(STAT, "statx", folder, path, syscall(SYS_statx, folder, path, flags, mask, found), (void)0); }

DIR *opendir(const char *path) {
  REAL("opendir", DIR *, const char *);
  char at[PATH_MAX];
  int after = 0;
  if (plan && whole(AT_FDCWD, path, at) && under(at) && due(LIST, "opendir", at, &after) == 1) return NULL;
  DIR *done = real(path);
  afterwards(after);
  return done;
}

int close(int fd) {
  char at[PATH_MAX];
  int after = 0;
  int bad = plan && of_descriptor(fd, at) && under(at) && due(CLOSE, "close", at, &after) == 1;
  int said = errno, done = (int)syscall(SYS_close, fd);
  afterwards(after);
  if (bad) { errno = said; return -1; }
  return done;
}
