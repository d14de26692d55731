/* Records what a process does to the files below one folder, in the order in which it happens.

   Loaded with LD_PRELOAD in front of the C library. Each call that changes files, or makes changes durable, is made and
   written to a log under one lock, so that the order of the log is an order in which the calls can have happened. With
   recorder_fail_at, calls fail instead, as on a full or broken disk, or write less than they were given.

   A record: 4 x int32 (kind, length of first path, of second path, of data), 3 x int64, the two paths, the data. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
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

enum kind { CREATE = 1, TRUNCATE, WRITE, ALLOCATE, SYNC, RENAME, UNLINK, MKDIR, RMDIR, SYMLINK, LINK, MARK, UNKNOWN, SYNC_ALL, EXCHANGE };
enum { TAKES_SPACE = 1, OTHER = 2, SHORT_WRITE = 4 }; /* what a full disk refuses; what only a broken one does */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char root[PATH_MAX];
static size_t root_length;
static int log_fd = -1;
static long calls, fail_at = -1;
static int fail_errno, fail_for_good, fail_kinds;

/* ---- the log ---------------------------------------------------------------------------------------------------- */
static void put(const void *data, size_t size) {
    const char *at = data;
    while (size) {
        long written = syscall(SYS_write, log_fd, at, size);
        if (written < 0) abort();
        at += written;
        size -= written;
    }
}

static void record(int kind, int64_t a, int64_t b, int64_t c, const char *one, const char *two, const void *data, size_t size) {
    if (log_fd < 0) return;
    int saved = errno;
    int32_t head[4] = {kind, one ? strlen(one) : 0, two ? strlen(two) : 0, (int32_t)size};
    int64_t numbers[3] = {a, b, c};
    put(head, sizeof head);
    put(numbers, sizeof numbers);
    if (one) put(one, head[1]);
    if (two) put(two, head[2]);
    if (size) put(data, size);
    errno = saved;
}

/* ---- which calls matter ----------------------------------------------------------------------------------------- */
static int below_root(const char *path) {
    return root_length && !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

/* The absolute path of `path`, seen from the folder open as `folder`; whether it is below the root. */
static int watched(int folder, const char *path, char *out) {
    if (!root_length || !path) return 0;
    if (path[0] == '/') {
        snprintf(out, PATH_MAX, "%s", path);
        return below_root(out);
    }
    char base[PATH_MAX], link[64];
    if (folder == AT_FDCWD) {
        if (!getcwd(base, sizeof base)) return 0;
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t length = readlink(link, base, sizeof base - 1);
        if (length < 0) return 0;
        base[length] = 0;
    }
    if (snprintf(out, PATH_MAX, "%s/%s", base, path) >= PATH_MAX) abort();
    return below_root(out);
}

static int watched_fd(int fd) {
    char link[64], path[PATH_MAX];
    if (!root_length) return 0;
    int saved = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = saved;
    if (length < 0) return 0;
    path[length] = 0;
    return below_root(path);
}

static int64_t inode(int fd) {
    struct stat status;
    return fstat(fd, &status) ? -1 : (int64_t)status.st_ino;
}

static int64_t inode_of(const char *path) {
    struct stat status;
    return lstat(path, &status) ? -1 : (int64_t)status.st_ino;
}

/* Whether this call is to fail. Called with the lock held, once for each call below the root. */
static int fails(int what) {
    if (!(what & fail_kinds)) return 0;
    long number = calls++;
    if (fail_at < 0 || number < fail_at || (number > fail_at && !fail_for_good)) return 0;
    errno = fail_errno;
    return 1;
}

/* ---- for the program under test --------------------------------------------------------------------------------- */
void recorder_start(const char *folder, const char *log_path) {
    pthread_mutex_lock(&lock);
    snprintf(root, sizeof root, "%s", folder);
    root_length = strlen(root);
    log_fd = *log_path ? (int)syscall(SYS_openat, AT_FDCWD, log_path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600) : -1;
    calls = 0;
    fail_at = -1;
    fail_kinds = 0;
    pthread_mutex_unlock(&lock);
}

void recorder_stop(void) {
    pthread_mutex_lock(&lock);
    root_length = 0;
    fail_at = -1;
    if (log_fd >= 0) syscall(SYS_close, log_fd);
    log_fd = -1;
    pthread_mutex_unlock(&lock);
}

void recorder_mark(const char *what) {
    pthread_mutex_lock(&lock);
    record(MARK, 0, 0, 0, what, 0, 0, 0);
    pthread_mutex_unlock(&lock);
}

/* Let the call `number` from now fail with `error`, and all after it if `for_good`. */
void recorder_fail_at(long number, int error, int for_good, int kinds) {
    pthread_mutex_lock(&lock);
    calls = 0;
    fail_at = number;
    fail_errno = error;
    fail_for_good = for_good;
    fail_kinds = kinds;
    pthread_mutex_unlock(&lock);
}

/* How many calls there were that could have failed. */
long recorder_calls(void) { return calls; }

/* ---- files ------------------------------------------------------------------------------------------------------ */
static int open_common(int folder, const char *path, int flags, mode_t mode) {
    char full[PATH_MAX];
    int writes = flags & (O_CREAT | O_TRUNC) || (flags & O_TMPFILE) == O_TMPFILE;
    if (!writes || !watched(folder, path, full))
        return syscall(SYS_openat, folder, path, flags, mode);
    pthread_mutex_lock(&lock);
    int anonymous = (flags & O_TMPFILE) == O_TMPFILE;
    int existed = !anonymous && inode_of(full) >= 0;
    int fd = -1;
    if (existed || !fails(TAKES_SPACE)) fd = syscall(SYS_openat, folder, path, flags, mode);
    if (fd >= 0) {
        if (anonymous || !existed) record(CREATE, inode(fd), 0, 0, anonymous ? "" : full, 0, 0, 0);
        else if (flags & O_TRUNC) record(TRUNCATE, inode(fd), 0, 0, 0, 0, 0, 0);
    }
    pthread_mutex_unlock(&lock);
    return fd;
}

#define OPEN(name)                                                                                                     \
    int name(const char *path, int flags, ...) {                                                                       \
        va_list more;                                                                                                  \
        va_start(more, flags);                                                                                         \
        mode_t mode = va_arg(more, int);                                                                               \
        va_end(more);                                                                                                  \
        return open_common(AT_FDCWD, path, flags, mode);                                                               \
    }
#define OPENAT(name)                                                                                                   \
    int name(int folder, const char *path, int flags, ...) {                                                           \
        va_list more;                                                                                                  \
        va_start(more, flags);                                                                                         \
        mode_t mode = va_arg(more, int);                                                                               \
        va_end(more);                                                                                                  \
        return open_common(folder, path, flags, mode);                                                                 \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

static ssize_t wrote(int fd, ssize_t result, off_t offset, const struct iovec *parts, int count) {
    if (result > 0) {
        char *data = malloc(result), *at = data;
        size_t left = result;
        if (!data) abort();
        for (int i = 0; i < count && left; i++) {
            size_t piece = parts[i].iov_len < left ? parts[i].iov_len : left;
            memcpy(at, parts[i].iov_base, piece);
            at += piece;
            left -= piece;
        }
        record(WRITE, inode(fd), offset, 0, 0, 0, data, result);
        free(data);
    }
    return result;
}

/* offset < 0: at the position of the file */
static ssize_t write_common(int fd, const struct iovec *parts, int count, off_t offset) {
    if (!watched_fd(fd))
        return offset < 0 ? syscall(SYS_writev, fd, parts, count) : syscall(SYS_pwritev, fd, parts, count, offset, 0);
    pthread_mutex_lock(&lock);
    ssize_t result = -1;
    struct iovec half = {parts->iov_base, parts->iov_len / 2 & ~4095L};
    if (fails(SHORT_WRITE) && half.iov_len) {
        parts = &half;
        count = 1;
    }
    if (!fails(TAKES_SPACE)) {
        result = offset < 0 ? syscall(SYS_writev, fd, parts, count) : syscall(SYS_pwritev, fd, parts, count, offset, 0);
        if (result > 0) wrote(fd, result, offset < 0 ? lseek(fd, 0, SEEK_CUR) - result : offset, parts, count);
    }
    pthread_mutex_unlock(&lock);
    return result;
}

ssize_t write(int fd, const void *data, size_t size) {
    if (!root_length) return syscall(SYS_write, fd, data, size);
    struct iovec part = {(void *)data, size};
    return write_common(fd, &part, 1, -1);
}
ssize_t writev(int fd, const struct iovec *parts, int count) { return write_common(fd, parts, count, -1); }

#define PWRITE(name)                                                                                                   \
    ssize_t name(int fd, const void *data, size_t size, off_t offset) {                                                \
        struct iovec part = {(void *)data, size};                                                                      \
        return write_common(fd, &part, 1, offset);                                                                     \
    }
#define PWRITEV(name)                                                                                                  \
    ssize_t name(int fd, const struct iovec *parts, int count, off_t offset) {                                         \
        return write_common(fd, parts, count, offset);                                                                 \
    }
PWRITE(pwrite)
PWRITE(pwrite64)
PWRITEV(pwritev)
PWRITEV(pwritev64)

#define PWRITEV2(name)                                                                                                 \
    ssize_t name(int fd, const struct iovec *parts, int count, off_t offset, int flags) {                              \
        if (!watched_fd(fd)) return syscall(SYS_pwritev2, fd, parts, count, offset, 0, flags);                         \
        pthread_mutex_lock(&lock);                                                                                     \
        ssize_t result = -1;                                                                                           \
        if (!fails(TAKES_SPACE)) {                                                                                     \
            result = syscall(SYS_pwritev2, fd, parts, count, offset, 0, flags);                                        \
            if (result > 0) wrote(fd, result, offset < 0 ? lseek(fd, 0, SEEK_CUR) - result : offset, parts, count);    \
        }                                                                                                              \
        pthread_mutex_unlock(&lock);                                                                                   \
        return result;                                                                                                 \
    }
PWRITEV2(pwritev2)
PWRITEV2(pwritev64v2)

#define FTRUNCATE(name)                                                                                                \
    int name(int fd, off_t size) {                                                                                     \
        if (!watched_fd(fd)) return syscall(SYS_ftruncate, fd, size);                                                  \
        pthread_mutex_lock(&lock);                                                                                     \
        int result = fails(OTHER) ? -1 : syscall(SYS_ftruncate, fd, size);                                             \
        if (!result) record(TRUNCATE, inode(fd), size, 0, 0, 0, 0, 0);                                                 \
        pthread_mutex_unlock(&lock);                                                                                   \
        return result;                                                                                                 \
    }
FTRUNCATE(ftruncate)
FTRUNCATE(ftruncate64)

static int allocate(int fd, int mode, off_t offset, off_t size) {
    pthread_mutex_lock(&lock);
    int result = fails(TAKES_SPACE) ? -1 : (int)syscall(SYS_fallocate, fd, mode, offset, size);
    if (!result) record(mode & ~FALLOC_FL_KEEP_SIZE ? UNKNOWN : ALLOCATE, inode(fd), offset, mode ? 0 : size, "fallocate", 0, 0, 0);
    pthread_mutex_unlock(&lock);
    return result;
}
#define FALLOCATE(name)                                                                                                \
    int name(int fd, int mode, off_t offset, off_t size) {                                                             \
        if (!watched_fd(fd)) return syscall(SYS_fallocate, fd, mode, offset, size);                                    \
        return allocate(fd, mode, offset, size);                                                                       \
    }
FALLOCATE(fallocate)
FALLOCATE(fallocate64)
#define POSIX_FALLOCATE(name)                                                                                          \
    int name(int fd, off_t offset, off_t size) {                                                                       \
        if (!watched_fd(fd)) return syscall(SYS_fallocate, fd, 0, offset, size) ? errno : 0;                           \
        return allocate(fd, 0, offset, size) ? errno : 0;                                                              \
    }
POSIX_FALLOCATE(posix_fallocate)
POSIX_FALLOCATE(posix_fallocate64)

#define SYNC_ONE(name)                                                                                                 \
    int name(int fd) {                                                                                                 \
        if (!watched_fd(fd)) return syscall(SYS_##name, fd);                                                           \
        pthread_mutex_lock(&lock);                                                                                     \
        int result = fails(OTHER) ? -1 : (int)syscall(SYS_##name, fd);                                                 \
        if (!result) record(SYNC, inode(fd), 0, 0, 0, 0, 0, 0);                                                        \
        pthread_mutex_unlock(&lock);                                                                                   \
        return result;                                                                                                 \
    }
SYNC_ONE(fsync)
SYNC_ONE(fdatasync)

int syncfs(int fd) {
    pthread_mutex_lock(&lock);
    int result = syscall(SYS_syncfs, fd);
    if (!result) record(SYNC_ALL, 0, 0, 0, 0, 0, 0, 0);
    pthread_mutex_unlock(&lock);
    return result;
}

/* ---- names ------------------------------------------------------------------------------------------------------ */
static int rename_common(int from, const char *old, int to, const char *new, unsigned flags) {
    char one[PATH_MAX], two[PATH_MAX];
    int first = watched(from, old, one), second = watched(to, new, two);
    if (!first && !second) return syscall(SYS_renameat2, from, old, to, new, flags);
    pthread_mutex_lock(&lock);
    int result = fails(OTHER) ? -1 : (int)syscall(SYS_renameat2, from, old, to, new, flags);
    if (!result) record(first && second && (!flags || flags == RENAME_NOREPLACE) ? RENAME : first && second && flags == RENAME_EXCHANGE ? EXCHANGE : UNKNOWN, 0, 0, 0, one, two, 0, 0);
    pthread_mutex_unlock(&lock);
    return result;
}
int rename(const char *old, const char *new) { return rename_common(AT_FDCWD, old, AT_FDCWD, new, 0); }
int renameat(int from, const char *old, int to, const char *new) { return rename_common(from, old, to, new, 0); }
int renameat2(int from, const char *old, int to, const char *new, unsigned flags) {
    return rename_common(from, old, to, new, flags);
}

static int unlink_common(int folder, const char *path, int flags) {
    char full[PATH_MAX];
    if (!watched(folder, path, full)) return syscall(SYS_unlinkat, folder, path, flags);
    pthread_mutex_lock(&lock);
    int result = fails(OTHER) ? -1 : (int)syscall(SYS_unlinkat, folder, path, flags);
    if (!result) record(flags & AT_REMOVEDIR ? RMDIR : UNLINK, 0, 0, 0, full, 0, 0, 0);
    pthread_mutex_unlock(&lock);
    return result;
}
int unlink(const char *path) { return unlink_common(AT_FDCWD, path, 0); }
int unlinkat(int folder, const char *path, int flags) { return unlink_common(folder, path, flags); }
int rmdir(const char *path) { return unlink_common(AT_FDCWD, path, AT_REMOVEDIR); }

static int mkdir_common(int folder, const char *path, mode_t mode) {
    char full[PATH_MAX];
    if (!watched(folder, path, full)) return syscall(SYS_mkdirat, folder, path, mode);
    pthread_mutex_lock(&lock);
    int result;
    if (inode_of(full) >= 0) {
        errno = EEXIST;
        result = -1;
    } else
        result = fails(TAKES_SPACE) ? -1 : (int)syscall(SYS_mkdirat, folder, path, mode);
    if (!result) record(MKDIR, inode_of(full), 0, 0, full, 0, 0, 0);
    pthread_mutex_unlock(&lock);
    return result;
}
int mkdir(const char *path, mode_t mode) { return mkdir_common(AT_FDCWD, path, mode); }
int mkdirat(int folder, const char *path, mode_t mode) { return mkdir_common(folder, path, mode); }

static int symlink_common(const char *target, int folder, const char *path) {
    char full[PATH_MAX];
    if (!watched(folder, path, full)) return syscall(SYS_symlinkat, target, folder, path);
    pthread_mutex_lock(&lock);
    int result = fails(TAKES_SPACE) ? -1 : (int)syscall(SYS_symlinkat, target, folder, path);
    if (!result) record(SYMLINK, inode_of(full), 0, 0, full, target, 0, 0);
    pthread_mutex_unlock(&lock);
    return result;
}
int symlink(const char *target, const char *path) { return symlink_common(target, AT_FDCWD, path); }
int symlinkat(const char *target, int folder, const char *path) { return symlink_common(target, folder, path); }

static int link_common(int from, const char *old, int to, const char *new, int flags) {
    char one[PATH_MAX], two[PATH_MAX];
    int first = watched(from, old, one);
    if (!watched(to, new, two)) return syscall(SYS_linkat, from, old, to, new, flags);
    pthread_mutex_lock(&lock);
    int result = fails(TAKES_SPACE) ? -1 : (int)syscall(SYS_linkat, from, old, to, new, flags);
    if (!result) record(LINK, inode_of(two), 0, 0, first ? one : "", two, 0, 0);
    pthread_mutex_unlock(&lock);
    return result;
}
int link(const char *old, const char *new) { return link_common(AT_FDCWD, old, AT_FDCWD, new, 0); }
int linkat(int from, const char *old, int to, const char *new, int flags) { return link_common(from, old, to, new, flags); }

/* ---- what would go past the recorder: said, so that nobody believes an incomplete log ------------------------------ */
static void unknown(int fd, const char *what) {
    if (!watched_fd(fd)) return;
    pthread_mutex_lock(&lock);
    record(UNKNOWN, 0, 0, 0, what, 0, 0, 0);
    pthread_mutex_unlock(&lock);
}
void *mmap(void *address, size_t size, int protection, int flags, int fd, off_t offset) {
    if (root_length && fd >= 0 && flags & MAP_SHARED && protection & PROT_WRITE) unknown(fd, "mmap");
    return (void *)syscall(SYS_mmap, address, size, protection, flags, fd, offset);
}
void *mmap64(void *address, size_t size, int protection, int flags, int fd, off_t offset) {
    return mmap(address, size, protection, flags, fd, offset);
}
ssize_t copy_file_range(int from, off64_t *a, int to, off64_t *b, size_t size, unsigned flags) {
    unknown(to, "copy_file_range");
    return syscall(SYS_copy_file_range, from, a, to, b, size, flags);
}
ssize_t sendfile(int to, int from, off_t *offset, size_t size) {
    unknown(to, "sendfile");
    return syscall(SYS_sendfile, to, from, offset, size);
}
ssize_t sendfile64(int to, int from, off64_t *offset, size_t size) { return sendfile(to, from, offset, size); }
