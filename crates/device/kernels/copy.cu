// Copies a list of byte ranges of any length and alignment. One source for NVRTC (NVIDIA), hipRTC
// (AMD) and, with -DKVFERRY_HOST, a plain C++ compiler, where tests run the same body on the CPU.
//
// Entries, which differ in how the list gets here:
//   kvferry_copy          descriptors in pinned memory
//   kvferry_copy_claimed  the same, and finds out whether destinations overlap
//   kvferry_copy_inline   descriptors in the kernel's parameters
//   kvferry_copy_compact  descriptors that stand for many copies each, in the kernel's parameters
// The last two also as _few, with less room.
//
// Unit of work: one warp (LANES threads) copies one descriptor; warps stride over the list. The
// host splits long ranges into tiles, so there is no tile loop here and no warp that finishes last.
// A compact descriptor is many units, each a tile as well.
//
// Descriptors and page numbers stay where the host wrote them, in pinned memory behind PCIe (about
// 1.5 us a read), so each warp requests those of its next unit before it copies the current one.
//
// Alignment ladder. Nothing has to be aligned; the destination decides:
//   head, tail   the up to 15 bytes before the first and after the last aligned 16 of the
//                destination: one lane a byte, both in one step
//   co-aligned   between them, where source and destination agree modulo 16: 16-byte loads and
//                stores, DEPTH loads in flight in each lane
//   shifted      where they do not: the two aligned words that hold the 16 bytes are loaded and
//                shifted into one 16-byte store
// A load touches only aligned words that hold at least one source byte, so it never leaves a page
// that the source is in. A store never leaves [dst, dst + len).
//
// Launch: blocks of BLOCK threads, any grid of at least one block, no shared memory. Until it ends
// nothing else writes a source (the shifted path reads through the read-only cache), and no
// destination overlaps another range. No lane talks to another: that is what lets the host run
// lanes as a loop, and lets LANES be wider than a hardware wave (RDNA has 32).
//
// Claims: the first blocks of kvferry_copy_claimed do not copy. Each of their threads takes
// descriptors of its own and claims their destinations in a hash table, beside the copies. An
// entry is one compare-and-swap for most, so this needs no order, no lock and no other thread.

typedef unsigned int u32;
typedef unsigned long long u64;

#define BLOCK 256

// What differs between compilers. An address that arrives as an integer becomes a generic pointer,
// with slower instructions (LD, FLAT) that find out at run time which memory is meant; the forms
// below say that it is global. `streaming` marks lines that the caches may drop first, as nobody
// here comes back to them. `funnel` is the low half of (high:low) >> bits, for bits below 32.
//
// `uniform` promises that all lanes of a warp have the value, and `load_uniform` reads what they all
// read and nothing writes. AMD's compilers make scalar loads of that. These are waited for apart
// from the other loads, which return in order: a word would wait for the descriptor that was asked
// for before it. `settle` waits for a value here; what is still awaited where a loop begins is
// awaited inside it, with all that was asked for since.

#if defined(KVFERRY_HOST)

#define DEVICE static inline
#define UNROLL
#define NO_UNROLL

struct Word {
    u32 x, y, z, w;
};

// A GPU faults on a misaligned access; a CPU would forgive it and hide the bug from the tests.
template <typename T>
DEVICE void* checked(u64 address) {
    if (address % sizeof(T) != 0) __builtin_trap();
    return reinterpret_cast<void*>(address);
}

template <typename T>
DEVICE T load_streaming(u64 address) {
    T value;
    __builtin_memcpy(&value, checked<T>(address), sizeof(T));
    return value;
}

template <typename T>
DEVICE T load_reused(u64 address) {
    return load_streaming<T>(address);
}

template <typename T>
DEVICE T load_uniform(u64 address) {
    return load_streaming<T>(address);
}

DEVICE void settle(u64&) {}

template <typename T>
DEVICE void store_streaming(u64 address, T value) {
    __builtin_memcpy(checked<T>(address), &value, sizeof(T));
}

DEVICE u32 funnel(u32 low, u32 high, u32 bits) {
    return static_cast<u32>(((static_cast<u64>(high) << 32) | low) >> bits);
}

DEVICE u64 compare_and_swap(u64 address, u64 expected, u64 value) {
    u64* place = static_cast<u64*>(checked<u64>(address));
    __atomic_compare_exchange_n(place, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}

DEVICE u64 fetch_or(u64 address, u64 bits) {
    return __atomic_fetch_or(static_cast<u64*>(checked<u64>(address)), bits, __ATOMIC_RELAXED);
}

#elif defined(__HIP__) || defined(__HIPCC_RTC__)

#define DEVICE static __device__ inline __attribute__((always_inline))
#define UNROLL _Pragma("unroll")
#define NO_UNROLL _Pragma("unroll 1")
#define LANES 64
// At least 7 waves on a SIMD, so at most 72 registers. Left alone, clang 22 (ROCm 7.2) takes 260 and
// more, which is room for one wave.
#define ENTRY extern "C" __global__ void __launch_bounds__(BLOCK, 7)
#define PARAMETER
#define GLOBAL __attribute__((address_space(1)))
#define CONSTANT __attribute__((address_space(4)))

typedef u32 Word __attribute__((ext_vector_type(4)));

template <typename T>
DEVICE T load_streaming(u64 address) {
    return __builtin_nontemporal_load(reinterpret_cast<const GLOBAL T*>(address));
}

template <typename T>
DEVICE T load_reused(u64 address) {
    return *reinterpret_cast<const GLOBAL T*>(address);
}

template <typename T>
DEVICE T load_uniform(u64 address) {
    return *reinterpret_cast<const CONSTANT T*>(address);
}

DEVICE u32 uniform(u32 value) {
    return __builtin_amdgcn_readfirstlane(value);
}

DEVICE void settle(u64& value) {
    asm volatile("" : "+s"(value));
}

template <typename T>
DEVICE void store_streaming(u64 address, T value) {
    __builtin_nontemporal_store(value, reinterpret_cast<GLOBAL T*>(address));
}

DEVICE u32 funnel(u32 low, u32 high, u32 bits) {
    return __builtin_amdgcn_alignbit(high, low, bits);
}

DEVICE u64 compare_and_swap(u64 address, u64 expected, u64 value) {
    __hip_atomic_compare_exchange_strong(reinterpret_cast<GLOBAL u64*>(address), &expected, value,
                                         __ATOMIC_RELAXED, __ATOMIC_RELAXED,
                                         __HIP_MEMORY_SCOPE_AGENT);
    return expected;
}

DEVICE u64 fetch_or(u64 address, u64 bits) {
    return __hip_atomic_fetch_or(reinterpret_cast<GLOBAL u64*>(address), bits, __ATOMIC_RELAXED,
                                 __HIP_MEMORY_SCOPE_AGENT);
}

#else

#define DEVICE static __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define NO_UNROLL _Pragma("unroll 1")
#define LANES 32
#define ENTRY extern "C" __global__ void __launch_bounds__(BLOCK)
#define PARAMETER __grid_constant__

typedef uint4 Word;

template <typename T>
DEVICE T load_streaming(u64 address) {
    return __ldcs(reinterpret_cast<const T*>(address));
}

template <typename T>
DEVICE T load_reused(u64 address) {
    return __ldg(reinterpret_cast<const T*>(address));
}

template <typename T>
DEVICE T load_uniform(u64 address) {
    return load_streaming<T>(address);
}

DEVICE u32 uniform(u32 value) {
    return value;
}

DEVICE void settle(u64&) {}

template <typename T>
DEVICE void store_streaming(u64 address, T value) {
    __stcs(reinterpret_cast<T*>(address), value);
}

DEVICE u32 funnel(u32 low, u32 high, u32 bits) {
    return __funnelshift_r(low, high, bits);
}

// The functions for these take a generic pointer, and look first which memory it is in.
DEVICE u64 compare_and_swap(u64 address, u64 expected, u64 value) {
    u64 found;
    asm volatile("atom.global.cas.b64 %0, [%1], %2, %3;"
                 : "=l"(found)
                 : "l"(address), "l"(expected), "l"(value)
                 : "memory");
    return found;
}

DEVICE u64 fetch_or(u64 address, u64 bits) {
    u64 found;
    asm volatile("atom.global.or.b64 %0, [%1], %2;"
                 : "=l"(found)
                 : "l"(address), "l"(bits)
                 : "memory");
    return found;
}

#endif

// The host's `CopyDescriptor`, field for field.
struct CopyDescriptor {
    u64 src, dst, len;
};

// The host's `CompactDescriptor`, field for field: `pages` x `layers` x `rows` copies of `len` bytes.
// Copy (p, l, r) reads at src + number(p) * src_page + l * src_layer + r * src_row, where number(p)
// is entry p of the list at src_pages, or p itself without a list; likewise it writes.
struct CompactDescriptor {
    u64 src, dst, len;
    u64 src_row, dst_row;
    u64 src_layer, dst_layer;
    u64 src_page, dst_page;
    u64 src_pages, dst_pages;
    u32 rows;
    // Units go through all of these, pages if pages_inner else layers, before the next of the others.
    u32 inner;
    u32 pages_inner;
    // A unit is `tile` words of the plane of all rows of one layer of one page (row_units is 0, and
    // every address and length is a multiple of 16), or `tile` bytes of one row.
    u32 tile;
    u32 row_units;    // units of one row
    u32 layer_units;  // units of one layer of one page
    u32 end;          // unit after this descriptor's last one, counted through the launch
    u32 unused;
};

// The host's `Claims`, field for field. Destinations begin and end at multiples of a granule from
// `low` on; 32 granules are a block. An entry of the table is a block's number and one, above, and a
// bit for each granule that is claimed, below; 0 is a free one. Where entries of other blocks are in
// the way the next place is taken, and the host leaves room enough that there always is one.
struct Claims {
    u64 table;    // 1 << log2 entries of u64
    u64 verdict;  // a u32 in pinned memory: set to the index of a descriptor that claims what is claimed
    u64 low;      // where the lowest destination begins
    u32 log2;
    u32 shift;    // a granule has 1 << shift bytes
    u32 first;    // index of the first descriptor here in the whole list
    u32 blocks;   // blocks of threads that claim; the others copy
};

// What fits into the 4 KiB of parameters that every driver takes, and into fewer, which a launch
// hands over quicker.
#define INLINE_DESCRIPTORS 160
#define INLINE_FEW_DESCRIPTORS 16
#define COMPACT_DESCRIPTORS 32
#define COMPACT_FEW_DESCRIPTORS 4

// The host's `EndWord`, field for field: what says that a launch is over, if `address` is not 0.
struct EndWord {
    u64 address;   // a u32 in pinned memory, which becomes `value`
    u64 arrivals;  // a u32 in device memory, 0 before and after: the blocks that are done
    u32 value;
    u32 unused;
};

template <typename Descriptor, u32 ROOM>
struct Parameters {
    Descriptor list[ROOM];
    u64 count;
    EndWord end;
};

typedef Parameters<CopyDescriptor, INLINE_DESCRIPTORS> InlineList;
typedef Parameters<CopyDescriptor, INLINE_FEW_DESCRIPTORS> InlineFewList;
typedef Parameters<CompactDescriptor, COMPACT_DESCRIPTORS> CompactList;
typedef Parameters<CompactDescriptor, COMPACT_FEW_DESCRIPTORS> CompactFewList;

static_assert(sizeof(CopyDescriptor) == 24, "the host writes 24-byte descriptors");
static_assert(sizeof(CompactDescriptor) == 120, "the host writes 120-byte compact descriptors");
static_assert(sizeof(Claims) == 40, "the host passes 40 bytes");
static_assert(sizeof(EndWord) == 24, "the host passes 24 bytes");
static_assert(sizeof(InlineList) <= 4096 && sizeof(CompactList) <= 4096, "a kernel's parameters");
static_assert(sizeof(Word) == 16, "the ladder counts in words of 16 bytes");

DEVICE CopyDescriptor load_descriptor(const CopyDescriptor* descriptor) {
    u64 address = reinterpret_cast<u64>(descriptor);
    CopyDescriptor range;
    range.src = load_uniform<u64>(address);
    range.dst = load_uniform<u64>(address + 8);
    range.len = load_uniform<u64>(address + 16);
    return range;
}

// The 16 bytes that begin `shift` (0 to 15) bytes into the pair. Whole 4-byte parts move by
// selection, two and then one, because indexing with a variable would put the parts in memory.
DEVICE Word shifted_word(Word first, Word second, u32 shift) {
    bool two = shift & 8;
    bool one = shift & 4;
    u32 a0 = two ? first.z : first.x;
    u32 a1 = two ? first.w : first.y;
    u32 a2 = two ? second.x : first.z;
    u32 a3 = two ? second.y : first.w;
    u32 a4 = two ? second.z : second.x;
    u32 a5 = two ? second.w : second.y;
    u32 b0 = one ? a1 : a0;
    u32 b1 = one ? a2 : a1;
    u32 b2 = one ? a3 : a2;
    u32 b3 = one ? a4 : a3;
    u32 b4 = one ? a5 : a4;
    u32 bits = shift % 4 * 8;
    Word word;
    word.x = funnel(b0, b1, bits);
    word.y = funnel(b1, b2, bits);
    word.z = funnel(b2, b3, bits);
    word.w = funnel(b3, b4, bits);
    return word;
}

// One batch, DEPTH words a lane at most: first all loads, so that they are in flight together, then
// the stores. `dst` and `src` are this lane's first word; `words`, of all lanes, matters only to
// the last batch, which is not WHOLE.
template <bool SHIFTED, bool WHOLE, u32 DEPTH>
DEVICE void copy_batch(u64 dst, u64 src, u32 words, u32 lane, u32 lanes) {
    u32 shift = src % 16;
    // Zero, because a register that only a skipped load writes stays live around all loops: without
    // it NVRTC takes 111 registers on sm_90, not 62, and spills when held to 64.
    Word first[DEPTH] = {}, second[DEPTH] = {};
    UNROLL
    for (u32 step = 0; step < DEPTH; step++) {
        if (!WHOLE && lane + step * lanes >= words) continue;
        u64 at = step * lanes * 16;
        if (SHIFTED) {
            // The next lane wants `second` as its `first`, so the cache should keep it.
            first[step] = load_reused<Word>(src - shift + at);
            second[step] = load_reused<Word>(src - shift + at + 16);
        } else {
            first[step] = load_streaming<Word>(src + at);
        }
    }
    UNROLL
    for (u32 step = 0; step < DEPTH; step++) {
        if (!WHOLE && lane + step * lanes >= words) continue;
        Word word = SHIFTED ? shifted_word(first[step], second[step], shift) : first[step];
        store_streaming(dst + step * lanes * 16, word);
    }
}

// Stores `words` words from `dst` on, a multiple of 16. All lanes take the same batches: lanes that
// part ways would wait for memory one after the other.
template <bool SHIFTED>
DEVICE void copy_words(u64 dst, u64 src, u64 words, u32 lane, u32 lanes) {
    const u32 depth = SHIFTED ? 4 : 8;  // eight loads a batch either way
    const u32 batch = depth * lanes;
    dst += lane * 16;
    src += lane * 16;
    NO_UNROLL
    for (; words >= batch; words -= batch) {
        copy_batch<SHIFTED, true, depth>(dst, src, batch, lane, lanes);
        dst += batch * 16;
        src += batch * 16;
    }
    copy_batch<SHIFTED, false, depth>(dst, src, static_cast<u32>(words), lane, lanes);
}

DEVICE void copy_range(CopyDescriptor range, u32 lane, u32 lanes) {
    u64 to_aligned = -range.dst % 16;
    u64 head = to_aligned < range.len ? to_aligned : range.len;
    u64 words = (range.len - head) / 16;
    u64 tail = (range.len - head) % 16;

    // Head and tail have at most 30 bytes together, so one byte a lane is enough. It is loaded
    // before the words and stored after them: its latency hides behind theirs.
    bool at_edge = lane < head + tail;
    u64 edge = lane < head ? lane : lane + words * 16;
    unsigned char edge_byte = 0;
    if (at_edge) edge_byte = load_streaming<unsigned char>(range.src + edge);

    u64 dst = range.dst + head;
    u64 src = range.src + head;
    if (src % 16 == 0) {
        copy_words<false>(dst, src, words, lane, lanes);
    } else {
        copy_words<true>(dst, src, words, lane, lanes);
    }

    if (at_edge) store_streaming(range.dst + edge, edge_byte);
}

// DEPTH words a lane of a plane: rows of `row_words` words that lie a stride apart at either end.
// `column` is that of this lane's first word, `src` and `dst` its addresses; a step of all lanes
// goes `step_rows` rows and `step_columns` columns on. Addresses are made twice, once to load and
// once to store, because keeping them takes more registers than adding again.
struct PlaneEnd {
    u64 address;
    u64 step;  // bytes from one step to the next inside a row
    u64 turn;  // bytes to add where a step passes the end of a row
};

struct PlaneWalk {
    u32 column, row_words, step_columns;
};

DEVICE void advance(PlaneEnd& end, PlaneWalk& walk) {
    end.address += end.step;
    walk.column += walk.step_columns;
    if (walk.column >= walk.row_words) {
        walk.column -= walk.row_words;
        end.address += end.turn;
    }
}

template <bool WHOLE>
DEVICE void copy_plane_batch(PlaneEnd& src, PlaneEnd& dst, PlaneWalk& walk, u32 words, u32 lane,
                             u32 lanes) {
    const u32 depth = 8;
    Word word[depth] = {};  // zero for the reason in `copy_batch`
    PlaneWalk loads = walk;
    UNROLL
    for (u32 step = 0; step < depth; step++) {
        if (WHOLE || lane + step * lanes < words) word[step] = load_streaming<Word>(src.address);
        advance(src, loads);
    }
    UNROLL
    for (u32 step = 0; step < depth; step++) {
        if (WHOLE || lane + step * lanes < words) store_streaming(dst.address, word[step]);
        advance(dst, walk);
    }
}

// Words [first, first + words) of a plane, counted row by row.
DEVICE void copy_plane(const CompactDescriptor& plane, u64 src, u64 dst, u32 first, u32 words,
                       u32 lane, u32 lanes) {
    const u32 batch = 8 * lanes;
    u32 row_words = static_cast<u32>(plane.len / 16);
    u32 row = (first + lane) / row_words;
    u32 step_rows = lanes / row_words;
    PlaneWalk walk;
    walk.row_words = row_words;
    walk.column = first + lane - row * row_words;
    walk.step_columns = lanes - step_rows * row_words;
    PlaneEnd from, to;
    from.address = src + row * plane.src_row + walk.column * 16ull;
    from.step = step_rows * plane.src_row + walk.step_columns * 16ull;
    from.turn = plane.src_row - plane.len;
    to.address = dst + row * plane.dst_row + walk.column * 16ull;
    to.step = step_rows * plane.dst_row + walk.step_columns * 16ull;
    to.turn = plane.dst_row - plane.len;
    NO_UNROLL
    for (; words >= batch; words -= batch) {
        copy_plane_batch<true>(from, to, walk, batch, lane, lanes);
    }
    if (words > 0) copy_plane_batch<false>(from, to, walk, words, lane, lanes);
}

// One unit of a compact list: which descriptor, which of its units inside one layer of one page,
// and where that layer of that page begins.
struct CompactUnit {
    u64 src, dst;
    u32 descriptor, unit;
};

// A list of numbers of 32 bits or, if the lowest bit of its address is set, of 16: half of what the
// host writes and the device reads over PCIe. Two of these are read at once, as AMD has no scalar
// load of 16 bits.
DEVICE u64 page_number(u64 pages, u32 page) {
    if (pages == 0) return page;
    u32 halves = static_cast<u32>(pages & 1);
    u32 word = load_uniform<u32>(pages - halves + (page >> halves) * 4ull);
    return halves == 0 ? word : word >> (page & 1) * 16 & 0xffff;
}

// `descriptor` is that of an earlier unit or 0; units are asked for in ascending order.
DEVICE CompactUnit locate(const CompactDescriptor* list, u32 descriptor, u32 unit) {
    while (unit >= list[descriptor].end) descriptor++;
    const CompactDescriptor& compact = list[descriptor];
    if (descriptor > 0) unit -= list[descriptor - 1].end;
    u32 of_all_layers = unit / compact.layer_units;
    u32 outer = of_all_layers / compact.inner;
    u32 inner = of_all_layers - outer * compact.inner;
    u32 page = compact.pages_inner ? inner : outer;
    u64 layer = compact.pages_inner ? outer : inner;
    CompactUnit found;
    found.src = compact.src + page_number(compact.src_pages, page) * compact.src_page +
                layer * compact.src_layer;
    found.dst = compact.dst + page_number(compact.dst_pages, page) * compact.dst_page +
                layer * compact.dst_layer;
    found.descriptor = descriptor;
    found.unit = unit - of_all_layers * compact.layer_units;
    return found;
}

DEVICE void copy_unit(const CompactDescriptor& compact, CompactUnit at, u32 lane, u32 lanes) {
    if (compact.row_units == 0) {
        u32 words = compact.rows * static_cast<u32>(compact.len / 16);
        u32 first = at.unit * compact.tile;
        u32 count = words - first < compact.tile ? words - first : compact.tile;
        copy_plane(compact, at.src, at.dst, first, count, lane, lanes);
        return;
    }
    u32 row = at.unit / compact.row_units;
    u64 offset = static_cast<u64>(at.unit - row * compact.row_units) * compact.tile;
    CopyDescriptor range;
    range.src = at.src + row * compact.src_row + offset;
    range.dst = at.dst + row * compact.dst_row + offset;
    range.len = compact.len - offset < compact.tile ? compact.len - offset : compact.tile;
    copy_range(range, lane, lanes);
}

// As `copy_list`, for `count` compact descriptors, at least one. Units and warps together are fewer
// than 2^32, which the host sees to.
DEVICE void copy_compact(const CompactDescriptor* list, u32 count, u32 warp, u32 warps, u32 lane,
                         u32 lanes) {
    u32 units = list[count - 1].end;
    if (warp >= units) return;
    CompactUnit now = locate(list, 0, warp);
    for (u32 unit = warp; unit < units; unit += warps) {
        CompactUnit next = now;
        if (unit + warps < units) next = locate(list, now.descriptor, unit + warps);
        copy_unit(list[now.descriptor], now, lane, lanes);
        now = next;
    }
}

// What lane `lane` of warp `warp`, of `warps` in the launch, does.
DEVICE void copy_list(const CopyDescriptor* descriptors, u32 count, u64 warp, u64 warps, u32 lane,
                      u32 lanes) {
    if (warp >= count) return;
    CopyDescriptor range = load_descriptor(descriptors + warp);
    settle(range.src);
    settle(range.dst);
    settle(range.len);
    for (u64 index = warp; index < count; index += warps) {
        CopyDescriptor next = {};
        if (index + warps < count) next = load_descriptor(descriptors + index + warps);
        copy_range(range, lane, lanes);
        range = next;
    }
}

// Claims the granules of a block for the descriptor with that index.
DEVICE void claim_block(const Claims& claims, u32 block, u32 granules, u32 index) {
    u64 number = block + 1ull;
    u64 entry = number << 32 | granules;
    // Neighbours end up far apart (Knuth's multiplicative hash).
    u32 place = block * 2654435769u >> (32 - claims.log2);
    u64 found;
    NO_UNROLL
    while (true) {
        u64 address = claims.table + place * 8ull;
        found = compare_and_swap(address, 0, entry);
        if (found >> 32 == number) found = fetch_or(address, granules);
        if (found == 0 || found >> 32 == number) break;
        place = (place + 1) & ((1u << claims.log2) - 1);
    }
    if (static_cast<u32>(found) & granules && found >> 32 == number) {
        store_streaming<u32>(claims.verdict, index);
    }
}

// Claims what thread `thread`, of `threads`, has of a list.
DEVICE void claim_list(const CopyDescriptor* descriptors, u32 count, const Claims& claims,
                       u32 thread, u32 threads) {
    NO_UNROLL
    for (u64 index = thread; index < count; index += threads) {
        u64 address = reinterpret_cast<u64>(descriptors + index);
        u64 begin = load_streaming<u64>(address + 8) - claims.low;
        u64 len = load_streaming<u64>(address + 16);
        if (len == 0) continue;
        u64 first = begin >> claims.shift;
        u64 last = (begin + len - 1) >> claims.shift;
        u32 first_block = static_cast<u32>(first / 32);
        u32 last_block = static_cast<u32>(last / 32);
        NO_UNROLL
        for (u32 block = first_block; block <= last_block; block++) {
            u32 granules = ~0u;
            if (block == first_block) granules &= ~0u << first % 32;
            if (block == last_block) granules &= ~0u >> (31 - last % 32);
            claim_block(claims, block, granules, claims.first + static_cast<u32>(index));
        }
    }
}

#if defined(KVFERRY_HOST)

// `lanes` is 32 or 64. The result does not depend on the order in which lanes run.
extern "C" void kvferry_copy_host(const CopyDescriptor* descriptors, u32 count, u32 grid,
                                  u32 lanes) {
    u64 warps_per_block = BLOCK / lanes;
    for (u64 block = 0; block < grid; block++) {
        for (u32 thread = 0; thread < BLOCK; thread++) {
            u64 warp = block * warps_per_block + thread / lanes;
            copy_list(descriptors, count, warp, grid * warps_per_block, thread % lanes, lanes);
        }
    }
}

extern "C" void kvferry_copy_claimed_host(const CopyDescriptor* descriptors, u32 count,
                                          const Claims* claims, u32 grid, u32 lanes) {
    u32 threads = claims->blocks * BLOCK;
    for (u32 thread = 0; thread < threads; thread++) {
        claim_list(descriptors, count, *claims, thread, threads);
    }
    kvferry_copy_host(descriptors, count, grid - claims->blocks, lanes);
}

extern "C" void kvferry_copy_compact_host(const CompactDescriptor* list, u32 count, u32 grid,
                                          u32 lanes) {
    u32 warps_per_block = BLOCK / lanes;
    for (u32 block = 0; block < grid; block++) {
        for (u32 thread = 0; thread < BLOCK; thread++) {
            u32 warp = block * warps_per_block + thread / lanes;
            copy_compact(list, count, warp, grid * warps_per_block, thread % lanes, lanes);
        }
    }
}

#else

static_assert(LANES >= 30, "the head and the tail are copied in one step, one byte a lane");

#define WARPS_PER_BLOCK (BLOCK / LANES)

ENTRY
kvferry_copy(const CopyDescriptor* descriptors, u32 count) {
    u64 warp = blockIdx.x * static_cast<u64>(WARPS_PER_BLOCK) + uniform(threadIdx.x / LANES);
    u64 warps = gridDim.x * static_cast<u64>(WARPS_PER_BLOCK);
    copy_list(descriptors, count, warp, warps, threadIdx.x % LANES, LANES);
}

ENTRY
kvferry_copy_claimed(const CopyDescriptor* descriptors, u32 count, const PARAMETER Claims claims) {
    if (blockIdx.x < claims.blocks) {
        u32 thread = blockIdx.x * BLOCK + threadIdx.x;
        claim_list(descriptors, count, claims, thread, claims.blocks * BLOCK);
        return;
    }
    u64 block = blockIdx.x - claims.blocks;
    u64 warp = block * static_cast<u64>(WARPS_PER_BLOCK) + uniform(threadIdx.x / LANES);
    u64 warps = (gridDim.x - claims.blocks) * static_cast<u64>(WARPS_PER_BLOCK);
    copy_list(descriptors, count, warp, warps, threadIdx.x % LANES, LANES);
}

// Stores the word when all blocks have come here, and all bytes of theirs are visible everywhere. On
// AMD a fence for the whole system writes a cache back, which each block would pay: the host stores
// the word there, behind the launch.
DEVICE void tell_end(const EndWord& end) {
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
    if (end.address == 0) return;
    __syncthreads();
    if (threadIdx.x != 0) return;
    // One fence is enough for the block: it comes behind the barrier, and so behind all its stores.
    __threadfence_system();
    u32 arrived;
    // Begins at 0 again behind the last one.
    asm volatile("atom.global.inc.u32 %0, [%1], %2;"
                 : "=r"(arrived)
                 : "l"(end.arrivals), "r"(gridDim.x - 1)
                 : "memory");
    if (arrived != gridDim.x - 1) return;
    __threadfence_system();
    asm volatile("st.volatile.global.u32 [%0], %1;" : : "l"(end.address), "r"(end.value) : "memory");
#else
    (void)end;
#endif
}

// Parameters that are indexed with a variable stay where they are only if the kernel promises not
// to write them.
template <typename List>
DEVICE void copy_inline(const List& parameters) {
    u32 warp = blockIdx.x * WARPS_PER_BLOCK + uniform(threadIdx.x / LANES);
    u32 warps = gridDim.x * WARPS_PER_BLOCK;
    for (u32 index = warp; index < parameters.count; index += warps) {
        copy_range(parameters.list[index], threadIdx.x % LANES, LANES);
    }
    tell_end(parameters.end);
}

template <typename List>
DEVICE void copy_compact(const List& parameters) {
    u32 warp = blockIdx.x * WARPS_PER_BLOCK + uniform(threadIdx.x / LANES);
    u32 warps = gridDim.x * WARPS_PER_BLOCK;
    copy_compact(parameters.list, static_cast<u32>(parameters.count), warp, warps,
                 threadIdx.x % LANES, LANES);
    tell_end(parameters.end);
}

ENTRY
kvferry_copy_inline(const PARAMETER InlineList parameters) {
    copy_inline(parameters);
}

ENTRY
kvferry_copy_inline_few(const PARAMETER InlineFewList parameters) {
    copy_inline(parameters);
}

ENTRY
kvferry_copy_compact(const PARAMETER CompactList parameters) {
    copy_compact(parameters);
}

ENTRY
kvferry_copy_compact_few(const PARAMETER CompactFewList parameters) {
    copy_compact(parameters);
}

#endif
