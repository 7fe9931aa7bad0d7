// Work that keeps a GPU busy while transfers run beside it. `kvferry bench --interference` measures
// with it what each costs the other; nothing else launches it. NVRTC compiles it at run time.
//
// Four loads, because transfers and a model meet in these places:
//   kvferry_load_gemm    a matrix product on the tensor cores (prefill): all SMs full, blocks that
//                        take hundreds of microseconds, caches in use
//   kvferry_load_blocks  short independent blocks of arithmetic: SMs come free every few tens of
//                        microseconds, no memory traffic
//   kvferry_load_memory  reads and writes a buffer once (decode): bound by device memory
//   kvferry_load_weights reads a buffer once: a decode step is a graph of many such launches, one
//                        for each matrix of weights
// `kvferry_load_fill` sets the operands: how much power a product takes, and so the clock, depends
// on the bits that flip, and zeros would flatter it.
//
// A step is one launch of one load, always the same work. Launch: blocks of BLOCK threads, no
// dynamic shared memory.

typedef unsigned int u32;
typedef unsigned long long u64;

#define BLOCK 256
#define DEVICE static __device__ __forceinline__
#define ENTRY extern "C" __global__ void __launch_bounds__(BLOCK)
#define UNROLL _Pragma("unroll")
#define NO_UNROLL _Pragma("unroll 1")

// `values` bfloat16 numbers between -1 and 1, two in a word; the same for the same `seed`. The host
// computes them, too (crates/device/src/cuda/load.rs). Any grid.
ENTRY kvferry_load_fill(u32* words, u64 values, u32 seed) {
    u64 threads = static_cast<u64>(gridDim.x) * BLOCK;
    for (u64 word = blockIdx.x * static_cast<u64>(BLOCK) + threadIdx.x; word < values / 2;
         word += threads) {
        u32 bits = (static_cast<u32>(word) + seed) * 2654435761u;
        bits ^= bits >> 15;
        bits *= 2246822519u;
        bits ^= bits >> 13;
        // Sign and seven bits of fraction at random, exponent of 0.5: +-[0.5, 1).
        words[word] = (bits & 0x807f807fu) | 0x3f003f00u;
    }
}

// A chain of dependent multiply-adds, two an iteration. Any grid; `sink` has room for one number.
ENTRY kvferry_load_blocks(float* sink, u32 iterations) {
    // Turns (a, b) about the origin, so that the numbers neither grow nor come to rest.
    float a = threadIdx.x, b = 0.5f;
    _Pragma("unroll 8")
    for (u32 iteration = 0; iteration < iterations; iteration++) {
        a = b * -0.1f + a;
        b = a * 0.1f + b;
    }
    // Never so, but the compiler cannot know: without a use it would drop the loop.
    if (a == 12345.0f) *sink = b;
}

// Reads and writes each word once. Any grid; `words` of 16 bytes.
ENTRY kvferry_load_memory(uint4* buffer, u64 words) {
    const u32 depth = 4;  // loads in flight in each lane
    u64 threads = static_cast<u64>(gridDim.x) * BLOCK;
    u64 word = blockIdx.x * static_cast<u64>(BLOCK) + threadIdx.x;
    NO_UNROLL
    for (; word + (depth - 1) * threads < words; word += depth * threads) {
        uint4 value[depth];
        UNROLL
        for (u32 step = 0; step < depth; step++) value[step] = __ldcs(buffer + word + step * threads);
        UNROLL
        for (u32 step = 0; step < depth; step++) {
            value[step].x++;
            __stcs(buffer + word + step * threads, value[step]);
        }
    }
    NO_UNROLL
    for (; word < words; word += threads) {
        uint4 value = __ldcs(buffer + word);
        value.x++;
        __stcs(buffer + word, value);
    }
}

// Reads each word once, as a product of a matrix of weights with a few tokens does. Any grid;
// `weights` of 16 bytes, `sink` has room for one number.
ENTRY kvferry_load_weights(const uint4* weights, u64 words, u32* sink) {
    const u32 depth = 4;  // loads in flight in each lane
    u64 threads = static_cast<u64>(gridDim.x) * BLOCK;
    u64 word = blockIdx.x * static_cast<u64>(BLOCK) + threadIdx.x;
    u32 sum = 0;
    NO_UNROLL
    for (; word + (depth - 1) * threads < words; word += depth * threads) {
        uint4 value[depth];
        UNROLL
        for (u32 step = 0; step < depth; step++) value[step] = __ldg(weights + word + step * threads);
        UNROLL
        for (u32 step = 0; step < depth; step++) {
            sum += value[step].x ^ value[step].y ^ value[step].z ^ value[step].w;
        }
    }
    NO_UNROLL
    for (; word < words; word += threads) {
        uint4 value = __ldg(weights + word);
        sum += value.x ^ value.y ^ value.z ^ value.w;
    }
    // As good as never so, but the compiler cannot know: without a use it would drop the loads.
    if (sum == 0x9e3779b9u) *sink = sum;
}

// The matrix product. C = A * transpose(B) with A of rows x depth, B of columns x depth and C of
// rows x columns, bfloat16 in, sums in float, bfloat16 out: a linear layer as engines store it.
//
// A block makes a tile of 128 x 128 of C with 8 warps, 2 x 4 of them, 64 x 32 each. It walks the
// depth in slices of 32, three of them in shared memory: while one is multiplied two are on their
// way. Grid: (columns / 128, rows / 128); depth a multiple of 32. Compute capability 8.0 or later.
#define TILE 128
#define SLICE 32
#define STAGES 3

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

DEVICE u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Starts a copy of 16 bytes from global to shared memory.
DEVICE void copy_async(u32 shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global));
}

// Closes a group of copies; also an empty one counts.
DEVICE void end_group() {
    asm volatile("cp.async.commit_group;");
}

// Waits until at most `LEFT` groups of this thread are on their way.
template <int LEFT>
DEVICE void wait_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// Four 8 x 8 matrices; lane l gives the address of row l % 8 of matrix l / 8.
DEVICE void load_matrices(u32 (&out)[4], u32 shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared)
                 : "memory");
}

// sum += a * b, of 16 x 16 and 16 x 8.
DEVICE void multiply_add(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two bfloat16 in a word, `first` in its low half.
DEVICE u32 pack(float first, float second) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
    return packed;
}

// Where a slice keeps 16 bytes, its `chunk`-th (0 to 3) of `row`. Moving the chunks of every second
// row puts eight rows of one chunk into all 32 banks, so that ldmatrix has no conflicts.
DEVICE u32 place(u32 row, u32 chunk) {
    return row * (SLICE * 2) + ((chunk ^ (row / 2 % 4)) * 16);
}

ENTRY kvferry_load_gemm(const unsigned short* a, const unsigned short* b, u32* c, u32 columns,
                        u32 depth) {
    const u32 slice_bytes = TILE * SLICE * 2;
    __shared__ __align__(128) unsigned char slices[STAGES * 2 * slice_bytes];
    u32 shared = shared_address(slices);
    u32 lane = threadIdx.x % 32;
    u32 warp = threadIdx.x / 32;
    u32 warp_row = warp / 4 * 64;
    u32 warp_column = warp % 4 * 32;

    // A thread brings 16 bytes of a row and of the row 64 below, of A and of B.
    u32 copy_row = threadIdx.x / 4;
    u32 copy_chunk = threadIdx.x % 4;
    u64 below = static_cast<u64>(depth) * 64;
    const unsigned short* from_a =
        a + (blockIdx.y * static_cast<u64>(TILE) + copy_row) * depth + copy_chunk * 8;
    const unsigned short* from_b =
        b + (blockIdx.x * static_cast<u64>(TILE) + copy_row) * depth + copy_chunk * 8;
    auto bring = [&](u32 slice, u32 stage) {
        u32 to = shared + stage * 2 * slice_bytes;
        u64 at = static_cast<u64>(slice) * SLICE;
        copy_async(to + place(copy_row, copy_chunk), from_a + at);
        copy_async(to + place(copy_row + 64, copy_chunk), from_a + at + below);
        copy_async(to + slice_bytes + place(copy_row, copy_chunk), from_b + at);
        copy_async(to + slice_bytes + place(copy_row + 64, copy_chunk), from_b + at + below);
    };

    float sums[4][4][4] = {};
    u32 slice_count = depth / SLICE;
    UNROLL
    for (u32 slice = 0; slice < STAGES - 1; slice++) {
        if (slice < slice_count) bring(slice, slice);
        end_group();
    }
    u32 stage = 0;
    NO_UNROLL
    for (u32 slice = 0; slice < slice_count; slice++) {
        // This slice is there, and every warp is done with the one whose place is filled next.
        wait_groups<STAGES - 2>();
        __syncthreads();
        if (slice + STAGES - 1 < slice_count) {
            bring(slice + STAGES - 1, stage == 0 ? STAGES - 1 : stage - 1);
        }
        end_group();
        u32 tile_a = shared + stage * 2 * slice_bytes;
        u32 tile_b = tile_a + slice_bytes;
        UNROLL
        for (u32 half = 0; half < SLICE / 16; half++) {
            u32 rows[4][4], pairs[2][4];
            UNROLL
            for (u32 m = 0; m < 4; m++) {
                u32 row = warp_row + m * 16 + lane % 16;
                load_matrices(rows[m], tile_a + place(row, half * 2 + lane / 16));
            }
            UNROLL
            for (u32 n = 0; n < 2; n++) {
                u32 row = warp_column + n * 16 + lane / 16 * 8 + lane % 8;
                load_matrices(pairs[n], tile_b + place(row, half * 2 + lane / 8 % 2));
            }
            UNROLL
            for (u32 m = 0; m < 4; m++) {
                UNROLL
                for (u32 n = 0; n < 4; n++) {
                    const u32(&pair)[4] = pairs[n / 2];
                    multiply_add(sums[m][n], rows[m], pair[n % 2 * 2], pair[n % 2 * 2 + 1]);
                }
            }
        }
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }

    UNROLL
    for (u32 m = 0; m < 4; m++) {
        UNROLL
        for (u32 n = 0; n < 4; n++) {
            u64 row = blockIdx.y * static_cast<u64>(TILE) + warp_row + m * 16 + lane / 4;
            u64 column = blockIdx.x * static_cast<u64>(TILE) + warp_column + n * 8 + lane % 4 * 2;
            c[(row * columns + column) / 2] = pack(sums[m][n][0], sums[m][n][1]);
            c[((row + 8) * columns + column) / 2] = pack(sums[m][n][2], sums[m][n][3]);
        }
    }
}

#endif
