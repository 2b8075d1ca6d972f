// Position ids and the additive attention mask of the target's pass over a tree, whose rows it writes at past + node.
//
// The work is the writing of [B, N, cache_length] elements: a block has one row of the mask, and a thread writes it in
// aligned pieces of 16 bytes.

namespace {

constexpr int THREADS = 256;
constexpr int PIECE_BYTES = 16;

// What one row of the mask sees.
struct Row {
    const unsigned int* ancestors;  // [W] words: bit n % 32 of word n / 32, this row's node sees node n
    const int* depths;              // [N]
    long long past;
    int N;
    int depth;
    int window;  // positions seen, the row's own included; 0: all

    __device__ bool sees(int column) const {
        long long distance;  // in positions; siblings share one
        if (column < past) {
            distance = depth + past - column;
        } else {
            const long long node = column - past;
            if (node >= N || !(ancestors[node / 32] >> (node % 32) & 1)) return false;
            distance = depth - depths[node];
        }
        return window == 0 || distance < window;
    }
};

// `hidden`: the bits of the most negative finite value; a visible element is 0.
template <typename Bits>
__device__ void encode_row(const int* depths, const int* ancestor_mask, const long long* root_positions,
                           const long long* past_lengths, int N, int W, int cache_length, int window,
                           long long* position_ids, Bits* attention_mask, Bits hidden) {
    const int node = blockIdx.x;
    const long long slot = blockIdx.y;
    const long long index = slot * N + node;
    const Row row = {reinterpret_cast<const unsigned int*>(ancestor_mask) + index * W,
                     depths + slot * N,
                     past_lengths[slot],
                     N,
                     depths[index],
                     window};
    if (threadIdx.x == 0) position_ids[index] = root_positions[slot] + row.depth;

    constexpr int PIECE = PIECE_BYTES / static_cast<int>(sizeof(Bits));
    Bits* mask = attention_mask + index * cache_length;
    // Pieces lie on multiples of 16 bytes: where the row does not begin on one, the first begins before the row.
    const int before = static_cast<int>(reinterpret_cast<unsigned long long>(mask) % PIECE_BYTES / sizeof(Bits));
    for (int first = static_cast<int>(threadIdx.x) * PIECE - before; first < cache_length; first += THREADS * PIECE) {
        alignas(PIECE_BYTES) Bits piece[PIECE];
#pragma unroll
        for (int i = 0; i < PIECE; ++i) {
            piece[i] = row.sees(first + i) ? Bits(0) : hidden;
        }
        if (first >= 0 && first + PIECE <= cache_length) {
            *reinterpret_cast<uint4*>(mask + first) = *reinterpret_cast<const uint4*>(piece);
        } else {
#pragma unroll
            for (int i = 0; i < PIECE; ++i) {
                if (first + i >= 0 && first + i < cache_length) mask[first + i] = piece[i];
            }
        }
    }
}

}  // namespace

// Grid: (N, batch). The mask's element type is known by its bits alone.
#define ENCODE_TREE(suffix, Bits, hidden)                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS) ddtree_encode_tree_##suffix(                              \
        const int* depths,               /* [B, N] */                                                               \
        const int* ancestor_mask,        /* [B, N, W] */                                                            \
        const long long* root_positions, /* [B] */                                                                  \
        const long long* past_lengths,   /* [B] */                                                                  \
        int N, int W, int cache_length, int window, long long* position_ids, /* [B, N] */                           \
        Bits* attention_mask /* [B, 1, N, cache_length] */) {                                                       \
        encode_row<Bits>(depths, ancestor_mask, root_positions, past_lengths, N, W, cache_length, window,           \
                         position_ids, attention_mask, hidden);                                                     \
    }

ENCODE_TREE(float32, unsigned int, 0xFF7FFFFFu)
ENCODE_TREE(float16, unsigned short, 0xFBFFu)
ENCODE_TREE(bfloat16, unsigned short, 0xFF7Fu)
