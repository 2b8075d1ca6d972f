// The rows of the accepted path: KV rows move, in place, to the end of the committed past; context features are gathered.
//
// The tree's pass wrote the row of node n at token past + n, and step i of the accepted path belongs at token past + i.
// Along a path nodes ascend from node 0, so step i is node i or a later one: rows move down, and a destination may be
// the source of an earlier step, never of a later one. Steps are taken in ascending order by the one thread that owns
// the bytes: a thread has a column of the rows of one cache, request and head, and shares it with none. So there is no
// barrier, and no schedule under which a row is overwritten before it has moved.

namespace {

constexpr int THREADS_COMMIT = 32;
constexpr int THREADS_GATHER = 256;
constexpr int STEPS_AT_ONCE = 8;  // read before the first of them is written, so that their latencies overlap

// [batch, kv_heads, cache, head_dim]
struct LinearRows {
    unsigned char* head;  // token 0 of this request and head
    int cache;
    int row_bytes;

    __device__ unsigned char* at(long long token) const {
        return token >= 0 && token < cache ? head + token * row_bytes : nullptr;
    }
};

// [blocks of the pool, kv_heads, tokens_per_block, head_dim]; token t is in block table[t / tokens_per_block]
struct PagedRows {
    unsigned char* pool;
    unsigned pool_blocks;
    const int* table;  // of this request
    int blocks;        // in the table
    int kv_heads;
    int head;
    int tokens_per_block;
    int row_bytes;

    __device__ unsigned char* at(long long token) const {
        if (token < 0 || token >= static_cast<long long>(blocks) * tokens_per_block) return nullptr;
        const int at = static_cast<int>(token);  // a division of 64 bits is a subroutine
        const unsigned block = table[at / tokens_per_block];
        if (block >= pool_blocks) return nullptr;  // not allocated, -1 as unsigned, or not in the pool
        const long long row = (static_cast<long long>(block) * kv_heads + head) * tokens_per_block;
        return pool + (row + at % tokens_per_block) * row_bytes;
    }
};

template <typename Word, typename Rows>
__device__ void move_columns(const Rows& rows, long long past, const int* nodes, int last_step) {
    const int words = rows.row_bytes / static_cast<int>(sizeof(Word));
    for (int column = threadIdx.x; column < words; column += blockDim.x) {
        for (int first = 1; first <= last_step; first += STEPS_AT_ONCE) {
            Word moving[STEPS_AT_ONCE];
            Word* to[STEPS_AT_ONCE];
#pragma unroll
            for (int i = 0; i < STEPS_AT_ONCE; ++i) {
                const int step = first + i;
                to[i] = nullptr;
                if (step > last_step || nodes[step] <= step) continue;  // none, or in its place already
                const Word* from = reinterpret_cast<const Word*>(rows.at(past + nodes[step]));
                Word* destination = reinterpret_cast<Word*>(rows.at(past + step));
                if (from == nullptr || destination == nullptr) continue;
                moving[i] = from[column];
                to[i] = destination + column;
            }
#pragma unroll
            for (int i = 0; i < STEPS_AT_ONCE; ++i) {
                if (to[i] != nullptr) *to[i] = moving[i];
            }
        }
    }
}

// `address`: of the cache. With row_bytes it says what every row is aligned to.
template <typename Rows>
__device__ void move_rows(const Rows& rows, long long address, long long past, const int* nodes, int last_step) {
    const long long alignment = address | rows.row_bytes;
    if (alignment % 16 == 0) {
        move_columns<uint4>(rows, past, nodes, last_step);
    } else if (alignment % 8 == 0) {
        move_columns<uint2>(rows, past, nodes, last_step);
    } else if (alignment % 4 == 0) {
        move_columns<unsigned int>(rows, past, nodes, last_step);
    } else if (alignment % 2 == 0) {
        move_columns<unsigned short>(rows, past, nodes, last_step);
    } else {
        move_columns<unsigned char>(rows, past, nodes, last_step);
    }
}

template <typename Word>
__device__ void copy_row(const unsigned char* from, int row_bytes, unsigned char* to) {  // from nullptr: zeros
    const int words = row_bytes / static_cast<int>(sizeof(Word));
    for (int column = threadIdx.x; column < words; column += blockDim.x) {
        reinterpret_cast<Word*>(to)[column] = from != nullptr ? reinterpret_cast<const Word*>(from)[column] : Word{};
    }
}

}  // namespace

// Grid: (batch * kv_heads, caches: key and value of every layer).
extern "C" __global__ void __launch_bounds__(THREADS_COMMIT)
    ddtree_commit_linear(const long long* pointers,      // [2 * layers] device addresses of the caches
                         const long long* past_lengths,  // [B]
                         const int* accepted_nodes,      // [B, D + 1]
                         const int* accepted_count,      // [B]
                         int D, int kv_heads, int cache, int row_bytes) {
    const int slot = blockIdx.x / kv_heads;
    const long long address = pointers[blockIdx.y];
    const LinearRows rows = {
        reinterpret_cast<unsigned char*>(address) + static_cast<long long>(blockIdx.x) * cache * row_bytes, cache,
        row_bytes};
    const int* nodes = accepted_nodes + static_cast<long long>(slot) * (D + 1);
    move_rows(rows, address, past_lengths[slot], nodes, min(accepted_count[slot], D));
}

// Grid: (batch * kv_heads, pools: key and value of every layer).
extern "C" __global__ void __launch_bounds__(THREADS_COMMIT)
    ddtree_commit_paged(const long long* pointers,      // [2 * layers] device addresses of the pools
                        const int* block_table,         // [B, blocks], -1: not allocated
                        const long long* past_lengths,  // [B]
                        const int* accepted_nodes,      // [B, D + 1]
                        const int* accepted_count,      // [B]
                        int D, int pool_blocks, int kv_heads, int tokens_per_block, int row_bytes, int blocks) {
    const int slot = blockIdx.x / kv_heads;
    const long long address = pointers[blockIdx.y];
    const PagedRows rows = {reinterpret_cast<unsigned char*>(address),
                            static_cast<unsigned>(pool_blocks),
                            block_table + static_cast<long long>(slot) * blocks,
                            blocks,
                            kv_heads,
                            static_cast<int>(blockIdx.x % kv_heads),
                            tokens_per_block,
                            row_bytes};
    const int* nodes = accepted_nodes + static_cast<long long>(slot) * (D + 1);
    move_rows(rows, address, past_lengths[slot], nodes, min(accepted_count[slot], D));
}

// Grid: (D + 1, batch). Rows after the accepted path, and all rows of a slot that failed, are zeros.
extern "C" __global__ void __launch_bounds__(THREADS_GATHER)
    ddtree_gather_features(const unsigned char* features,  // [B, N, row_bytes]
                           const int* accepted_nodes,      // [B, D + 1]
                           const int* accepted_count,      // [B]
                           int N, int D, int row_bytes,
                           unsigned char* gathered) {  // [B, D + 1, row_bytes]
    const int step = blockIdx.x;
    const long long slot = blockIdx.y;
    const int node = step <= accepted_count[slot] ? accepted_nodes[slot * (D + 1) + step] : -1;
    const unsigned char* from = node >= 0 && node < N ? features + (slot * N + node) * row_bytes : nullptr;
    unsigned char* to = gathered + (slot * (D + 1) + step) * row_bytes;
    const unsigned long long alignment =
        reinterpret_cast<unsigned long long>(features) | reinterpret_cast<unsigned long long>(gathered) | row_bytes;
    if (alignment % 16 == 0) {
        copy_row<uint4>(from, row_bytes, to);
    } else if (alignment % 4 == 0) {
        copy_row<unsigned int>(from, row_bytes, to);
    } else {
        copy_row<unsigned char>(from, row_bytes, to);
    }
}
