/* Stands in for libmooncake_store.so where nobody has built one: the functions of its C interface that are used, over
 * objects in this process, with the answers that were seen of the real one. Stricter in one thing: memory that was not
 * registered is refused, as RDMA would. A pool is named by the address of its master and lives as long as the
 * process. A pool called "refuse-N" refuses the N-th registration of each store with -1. */
#include <pthread.h>
#include <regex.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID = -600, MISSING = -704 };

struct object {
  struct object *next;
  char *pool, *key;
  void *bytes;
  size_t size;
};

struct range {
  struct range *next;
  char *base;
  size_t size;
};

struct store {
  char *pool;
  struct range *ranges;
  int registrations;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct object *objects;

static struct object **find(struct store *s, const char *key) {
  struct object **o = &objects;
  while (*o && (strcmp((*o)->pool, s->pool) || strcmp((*o)->key, key))) o = &(*o)->next;
  return o;
}

static void drop(struct object **at) {
  struct object *o = *at;
  *at = o->next;
  free(o->pool);
  free(o->key);
  free(o->bytes);
  free(o);
}

static int inside(struct store *s, const void *at, size_t size) {
  for (struct range *r = s->ranges; r; r = r->next)
    if ((char *)at >= r->base && (char *)at + size <= r->base + r->size) return 1;
  return 0;
}

void *mooncake_store_create(void) { return calloc(1, sizeof(struct store)); }

void mooncake_store_destroy(void *store) {
  struct store *s = store;
  while (s->ranges) {
    struct range *r = s->ranges;
    s->ranges = r->next;
    free(r);
  }
  free(s->pool);
  free(s);
}

int mooncake_store_setup(void *store, const char *host, const char *metadata, uint64_t segment, uint64_t local,
                         const char *protocol, const char *device, const char *master) {
  (void)host, (void)metadata, (void)segment, (void)local, (void)protocol, (void)device;
  if (!strcmp(master, "nowhere")) return -1;
  ((struct store *)store)->pool = strdup(master);
  return OK;
}

int mooncake_store_health_check(void *store) { return ((struct store *)store)->pool ? OK : -1; }

int mooncake_store_register_buffer(void *store, void *buffer, size_t size) {
  struct store *s = store;
  const char *nth = strstr(s->pool, "refuse-");
  int result = OK;
  pthread_mutex_lock(&lock);
  if (nth && ++s->registrations == atoi(nth + 7)) result = -1;
  for (struct range *r = s->ranges; r && result == OK; r = r->next)
    if ((char *)buffer < r->base + r->size && r->base < (char *)buffer + size) result = INVALID;
  if (result == OK) {
    struct range *r = malloc(sizeof *r);
    r->next = s->ranges, r->base = buffer, r->size = size;
    s->ranges = r;
  }
  pthread_mutex_unlock(&lock);
  return result;
}

int mooncake_store_unregister_buffer(void *store, void *buffer) {
  struct store *s = store;
  int result = INVALID;
  pthread_mutex_lock(&lock);
  for (struct range **r = &s->ranges; *r; r = &(*r)->next)
    if ((*r)->base == buffer) {
      struct range *gone = *r;
      *r = gone->next;
      free(gone);
      result = OK;
      break;
    }
  pthread_mutex_unlock(&lock);
  return result;
}

int mooncake_store_batch_put_from(void *store, const char **keys, void **buffers, const size_t *sizes, size_t count,
                                  const void *config, int *results) {
  struct store *s = store;
  (void)config;
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < count; i++) {
    if (!inside(s, buffers[i], sizes[i])) {
      results[i] = INVALID;
      continue;
    }
    results[i] = OK;
    /* What is there stays. */
    if (*find(s, keys[i])) continue;
    struct object *o = malloc(sizeof *o);
    o->pool = strdup(s->pool), o->key = strdup(keys[i]);
    o->bytes = malloc(sizes[i] ? sizes[i] : 1), o->size = sizes[i];
    memcpy(o->bytes, buffers[i], sizes[i]);
    o->next = objects, objects = o;
  }
  pthread_mutex_unlock(&lock);
  return OK;
}

int mooncake_store_batch_get_into(void *store, const char **keys, void **buffers, const size_t *sizes, size_t count,
                                  int64_t *results) {
  struct store *s = store;
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < count; i++) {
    struct object *o = *find(s, keys[i]);
    results[i] = !o ? MISSING : o->size > sizes[i] || !inside(s, buffers[i], sizes[i]) ? INVALID : (int64_t)o->size;
    if (results[i] >= 0) memcpy(buffers[i], o->bytes, o->size);
  }
  pthread_mutex_unlock(&lock);
  return OK;
}

int mooncake_store_batch_is_exist(void *store, const char **keys, size_t count, int *results) {
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < count; i++) results[i] = *find(store, keys[i]) != NULL;
  pthread_mutex_unlock(&lock);
  return OK;
}

int64_t mooncake_store_get_size(void *store, const char *key) {
  pthread_mutex_lock(&lock);
  struct object *o = *find(store, key);
  int64_t size = o ? (int64_t)o->size : MISSING;
  pthread_mutex_unlock(&lock);
  return size;
}

int mooncake_store_remove(void *store, const char *key, int force) {
  (void)force;
  pthread_mutex_lock(&lock);
  struct object **o = find(store, key);
  int result = *o ? OK : MISSING;
  if (*o) drop(o);
  pthread_mutex_unlock(&lock);
  return result;
}

int64_t mooncake_store_remove_by_regex(void *store, const char *pattern, int force) {
  struct store *s = store;
  regex_t regex;
  int64_t removed = 0;
  (void)force;
  if (regcomp(&regex, pattern, REG_EXTENDED | REG_NOSUB)) return INVALID;
  pthread_mutex_lock(&lock);
  for (struct object **o = &objects; *o;) {
    if (!strcmp((*o)->pool, s->pool) && !regexec(&regex, (*o)->key, 0, NULL, 0)) {
      drop(o);
      removed++;
    } else {
      o = &(*o)->next;
    }
  }
  pthread_mutex_unlock(&lock);
  regfree(&regex);
  return removed;
}
