// The kernels once more, with the long page lists.
#define KVX_LARGE
#include "kv_copy.cu"
