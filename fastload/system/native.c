/* The inner loops that Python, NumPy and torch cannot run fast enough: rows of a file copied into a batch, and images
 * decoded, cut, resized, turned and normalized, each with a window of its own, in one call without the GIL; and what is
 * drawn for each sample, its place in an epoch and its window.
 *
 * native.py calls it through ctypes; nothing of Python is used here. It is optional: where it is not compiled, NumPy,
 * simplejpeg and TorchScript (`transforms/engine/resample.py`) do the same, and tests hold the two equal.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>
#include <time.h>

/* FASTLOAD_PLAIN: without vectors, as other CPUs run it. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(FASTLOAD_PLAIN)
#include <immintrin.h>
#define HAS_AVX2_CODE 1
#define AVX2 __attribute__((target("avx2,fma")))
#endif

#if defined(__aarch64__) && defined(__ARM_NEON) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#include <arm_neon.h>
#define HAS_NEON_CODE 1
#endif

#define EXPORT __attribute__((visibility("default")))

#ifdef HAS_AVX2_CODE
static int has_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
#endif

/* Bytes that vector loads may read behind the last level of a line. */
#define PADDING 64

/* ---- Copying rows ------------------------------------------------------------------------------------------------ */

/* Bytes ahead of the copy that are asked for: rows lie anywhere, so the CPU's own prefetch begins anew with each. Into its
 * second cache, since the first one waits for fewer lines at a time: rows of 3 KB and 12 KB were copied 1.4 times as fast
 * as with 1 KB asked for into the first one. */
#define AHEAD 3072

/* What is asked for while a row is copied or hashed: bytes further on, behind its end those of a row further on. */
typedef struct {
    int64_t bytes, rows;
} Ahead;

static inline Ahead ahead_in(int64_t row_bytes, int64_t wanted)
{
    if (row_bytes >= wanted)
        return (Ahead){wanted, 1};
    return (Ahead){row_bytes, row_bytes ? wanted / row_bytes : 0};
}

static inline void ask_for(const uint8_t *from, int first_cache)
{
    if (first_cache)
        __builtin_prefetch(from, 0, 3);
    else
        __builtin_prefetch(from, 0, 2);
}

static inline int64_t row_ahead(Ahead ahead, int64_t row, int64_t count)
{
    return row + ahead.rows < count ? row + ahead.rows : count - 1;
}

#define LINE 64 /* bytes of the CPU's cache */

/* Memory that is written from its beginning to its end. With `streams` past the CPU's cache: a batch larger than the
 * cache pushes itself out of it before it is used, and a line that is written through the cache is read from memory
 * first. Only whole lines are streamed: rows of 784 bytes took three times as long with the parts of lines at their ends
 * written through the cache. */
typedef struct {
    uint8_t *to; /* where the next bytes go, those held first */
    int64_t held; /* bytes of a line whose end has not come */
    int streams;
    _Alignas(LINE) uint8_t line[LINE];
} Output;

static inline void begin_output(Output *output, uint8_t *to, int streams)
{
    output->to = to, output->held = 0, output->streams = streams;
}

#ifdef HAS_AVX2_CODE
AVX2 static inline void stream_line(uint8_t *to, const uint8_t *from)
{
    for (int half = 0; half < LINE; half += 32)
        _mm256_stream_si256((__m256i *)(to + half), _mm256_loadu_si256((const __m256i *)(from + half)));
}

/* Writes bytes, and with `prefetches` asks for as many at `ahead`. */
AVX2 static inline void append_avx2(Output *output, const uint8_t *from, int64_t count, const uint8_t *ahead, int prefetches)
{
    int64_t at = 0;
    if (!output->streams) {
        for (; at + LINE <= count; at += LINE) {
            if (prefetches)
                ask_for(ahead + at, 0);
            for (int half = 0; half < LINE; half += 32)
                _mm256_storeu_si256((__m256i *)(output->to + at + half),
                                    _mm256_loadu_si256((const __m256i *)(from + at + half)));
        }
        memcpy(output->to + at, from + at, (size_t)(count - at));
        output->to += count;
    } else {
        int64_t before = output->held ? output->held : (intptr_t)output->to % LINE;
        if (before) { /* the rest of a line, as far as it came */
            at = LINE - before < count ? LINE - before : count;
            if (!output->held) {
                memcpy(output->to, from, (size_t)at);
                output->to += at;
            } else {
                memcpy(output->line + before, from, (size_t)at);
                output->held += at;
                if (output->held == LINE) {
                    stream_line(output->to, output->line);
                    output->to += LINE, output->held = 0;
                }
            }
        }
        uint8_t *to = output->to - at;
        for (; at + LINE <= count; at += LINE) {
            if (prefetches)
                ask_for(ahead + at, 0);
            stream_line(to + at, from + at);
        }
        if (at < count || !output->held)
            output->to = to + at;
        if (at < count) {
            output->held = count - at;
            memcpy(output->line, from + at, (size_t)output->held);
        }
    }
    if (prefetches && count % LINE)
        ask_for(ahead + count - 1, 0);
}
#endif

static inline void append(Output *output, const uint8_t *from, int64_t count)
{
#ifdef HAS_AVX2_CODE
    if (has_avx2()) {
        append_avx2(output, from, count, NULL, 0);
        return;
    }
#endif
    memcpy(output->to, from, (size_t)count);
    output->to += count;
}

static inline void end_output(Output *output)
{
    memcpy(output->to, output->line, (size_t)output->held);
#ifdef HAS_AVX2_CODE
    if (output->streams && has_avx2())
        _mm_sfence();
#endif
}

#ifdef HAS_AVX2_CODE
AVX2 static void gather_avx2(const uint8_t *const *rows, int64_t count, int64_t row_bytes, Output *output)
{
    const Ahead ahead = ahead_in(row_bytes, AHEAD);
    const int64_t near = row_bytes - ahead.bytes;
    for (int64_t i = 0; i < count; i++) {
        if (near)
            append_avx2(output, rows[i], near, rows[i] + ahead.bytes, 1);
        append_avx2(output, rows[i] + near, ahead.bytes, rows[row_ahead(ahead, i, count)], 1);
    }
}
#endif

/* Copies rows of `row_bytes` bytes one after another. */
EXPORT void fastload_gather(const uint8_t *const *rows, int64_t count, int64_t row_bytes, uint8_t *to, int streams)
{
    Output output;
    begin_output(&output, to, streams);
#ifdef HAS_AVX2_CODE
    if (has_avx2()) {
        gather_avx2(rows, count, row_bytes, &output);
        end_output(&output);
        return;
    }
#endif
    for (int64_t i = 0; i < count; i++)
        append(&output, rows[i], row_bytes);
    end_output(&output);
}

/* ---- Digests -------------------------------------------------------------------------------------------------------
 * XXH3-64 as xxHash's specification describes it, without a seed, of rows that are longer than 240 bytes: shorter ones
 * are hashed in another way, which is left to the package xxhash. A row may be of several pieces, one after another.
 */
#define STRIPE 64
#define STRIPES 16 /* of a block, after which the lanes are mixed */
#define HASHED (8 * STRIPE) /* copied at a time, while they are in the cache */

/* Rows from which on the CPU asks for most lines by itself: hashing them is faster with the rest in the first cache. */
#define LONG 32768
#define AHEAD_IN_LONG 2048

static const uint64_t PRIME32_1 = 0x9E3779B1, PRIME64_1 = 0x9E3779B185EBCA87;

static const uint8_t SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d,
    0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0,
    0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0,
    0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b,
    0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac,
    0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51,
    0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34,
    0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49,
    0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8,
    0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b,
    0x40, 0x7e,
};

/* A digest on its way. */
typedef struct {
    uint64_t lanes[8];
    int64_t total, seen;      /* bytes of the row, and how many came */
    int64_t stripes, done;    /* stripes before the last one, and how many were taken */
    uint8_t part[STRIPE];     /* the beginning of a stripe whose end has not come */
    uint8_t last[STRIPE];     /* the last bytes of the row, as far as they came */
    int64_t in_part;
    int is_long;              /* whether it is asked for as LONG says */
} Digest;

static inline uint64_t word(const uint8_t *from)
{
    uint64_t value;
    memcpy(&value, from, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    value = __builtin_bswap64(value);
#endif
    return value;
}

/* Adds a stripe to the lanes; `key` is where its secret begins. Compilers make vectors of it. */
static inline void add_stripe(uint64_t *lanes, const uint8_t *from, const uint8_t *key)
{
    for (int lane = 0; lane < 8; lane++) {
        uint64_t value = word(from + 8 * lane), mixed = value ^ word(key + 8 * lane);
        lanes[lane ^ 1] += value;
        lanes[lane] += (mixed & 0xFFFFFFFF) * (mixed >> 32);
    }
}

static void add_stripes(uint64_t *lanes, const uint8_t *from, int64_t count, int64_t number, const uint8_t *ahead,
                        int first_cache)
{
    for (; count > 0; count--, number++, from += STRIPE, ahead += STRIPE) {
        ask_for(ahead, first_cache);
        add_stripe(lanes, from, SECRET + number % STRIPES * 8);
        if (number % STRIPES == STRIPES - 1)
            for (int lane = 0; lane < 8; lane++)
                lanes[lane] = (lanes[lane] ^ lanes[lane] >> 47 ^ word(SECRET + 128 + 8 * lane)) * PRIME32_1;
    }
}

#ifdef HAS_AVX2_CODE
AVX2 static void add_stripes_avx2(uint64_t *lanes, const uint8_t *from, int64_t count, int64_t number,
                                  const uint8_t *ahead, int first_cache)
{
    const __m256i prime = _mm256_set1_epi64x((int64_t)PRIME32_1);
    __m256i sums[2];
    for (int half = 0; half < 2; half++)
        sums[half] = _mm256_loadu_si256((const __m256i *)(lanes + 4 * half));
    for (; count > 0; count--, number++, from += STRIPE, ahead += STRIPE) {
        ask_for(ahead, first_cache);
        const uint8_t *key = SECRET + number % STRIPES * 8;
        for (int half = 0; half < 2; half++) {
            __m256i values = _mm256_loadu_si256((const __m256i *)(from + 32 * half));
            __m256i mixed = _mm256_xor_si256(values, _mm256_loadu_si256((const __m256i *)(key + 32 * half)));
            __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
            sums[half] = _mm256_add_epi64(sums[half], _mm256_shuffle_epi32(values, _MM_SHUFFLE(1, 0, 3, 2)));
            sums[half] = _mm256_add_epi64(sums[half], product);
        }
        if (number % STRIPES != STRIPES - 1)
            continue;
        for (int half = 0; half < 2; half++) {
            __m256i mixed = _mm256_xor_si256(sums[half], _mm256_srli_epi64(sums[half], 47));
            mixed = _mm256_xor_si256(mixed, _mm256_loadu_si256((const __m256i *)(SECRET + 128 + 32 * half)));
            __m256i high = _mm256_slli_epi64(_mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime), 32);
            sums[half] = _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), high);
        }
    }
    for (int half = 0; half < 2; half++)
        _mm256_storeu_si256((__m256i *)(lanes + 4 * half), sums[half]);
}
#endif

#ifdef HAS_NEON_CODE
static void add_stripes_neon(uint64_t *lanes, const uint8_t *from, int64_t count, int64_t number,
                             const uint8_t *ahead, int first_cache)
{
    const uint32x2_t prime = vdup_n_u32((uint32_t)PRIME32_1);
    uint64x2_t sums[4];
    for (int pair = 0; pair < 4; pair++)
        sums[pair] = vld1q_u64(lanes + 2 * pair);
    for (; count > 0; count--, number++, from += STRIPE, ahead += STRIPE) {
        ask_for(ahead, first_cache);
        const uint8_t *key = SECRET + number % STRIPES * 8;
        for (int pair = 0; pair < 4; pair++) {
            uint64x2_t values = vreinterpretq_u64_u8(vld1q_u8(from + 16 * pair));
            uint64x2_t mixed = veorq_u64(values, vreinterpretq_u64_u8(vld1q_u8(key + 16 * pair)));
            sums[pair] = vaddq_u64(sums[pair], vextq_u64(values, values, 1));
            sums[pair] = vmlal_u32(sums[pair], vmovn_u64(mixed), vshrn_n_u64(mixed, 32));
        }
        if (number % STRIPES != STRIPES - 1)
            continue;
        for (int pair = 0; pair < 4; pair++) {
            uint64x2_t mixed = veorq_u64(sums[pair], vshrq_n_u64(sums[pair], 47));
            mixed = veorq_u64(mixed, vreinterpretq_u64_u8(vld1q_u8(SECRET + 128 + 16 * pair)));
            uint64x2_t high = vshlq_n_u64(vmull_u32(vshrn_n_u64(mixed, 32), prime), 32);
            sums[pair] = vmlal_u32(high, vmovn_u64(mixed), prime);
        }
    }
    for (int pair = 0; pair < 4; pair++)
        vst1q_u64(lanes + 2 * pair, sums[pair]);
}
#endif

static void take_stripes(Digest *digest, const uint8_t *from, int64_t count, const uint8_t *ahead)
{
#if defined(HAS_NEON_CODE)
    add_stripes_neon(digest->lanes, from, count, digest->done, ahead, digest->is_long);
#elif defined(HAS_AVX2_CODE)
    (has_avx2() ? add_stripes_avx2 : add_stripes)(digest->lanes, from, count, digest->done, ahead, digest->is_long);
#else
    add_stripes(digest->lanes, from, count, digest->done, ahead, digest->is_long);
#endif
    digest->done += count;
}

static void begin_digest(Digest *digest, int64_t total)
{
    const uint64_t first[8] = {0xC2B2AE3D, PRIME64_1, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
                               0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, PRIME32_1};
    memcpy(digest->lanes, first, sizeof first);
    digest->total = total;
    digest->stripes = (total - 1) / STRIPE;
    digest->seen = digest->done = digest->in_part = 0;
    digest->is_long = total >= LONG;
}

/* Takes the next bytes of a row. */
static void digest_bytes(Digest *digest, const uint8_t *from, int64_t count, const uint8_t *ahead)
{
    int64_t behind = digest->seen + count - (digest->total - STRIPE); /* of the last stripe, how much has come then */
    if (behind > 0) {
        int64_t some = behind < count ? behind : count;
        memcpy(digest->last + behind - some, from + count - some, (size_t)some);
    }
    digest->seen += count;
    if (digest->in_part) {
        int64_t some = STRIPE - digest->in_part < count ? STRIPE - digest->in_part : count;
        memcpy(digest->part + digest->in_part, from, (size_t)some);
        digest->in_part += some, from += some, count -= some;
        if (digest->in_part < STRIPE)
            return;
        digest->in_part = 0;
        if (digest->done < digest->stripes)
            take_stripes(digest, digest->part, 1, ahead);
    }
    int64_t whole = count / STRIPE, left = digest->stripes - digest->done;
    whole = whole < left ? whole : left;
    take_stripes(digest, from, whole, ahead);
    if (digest->done < digest->stripes) {
        digest->in_part = count - whole * STRIPE;
        memcpy(digest->part, from + whole * STRIPE, (size_t)digest->in_part);
    }
}

static uint64_t end_digest(Digest *digest)
{
    add_stripe(digest->lanes, digest->last, SECRET + 192 - STRIPE - 7);
    uint64_t found = (uint64_t)digest->total * PRIME64_1;
    for (int i = 0; i < 8; i += 2) {
        const uint8_t *key = SECRET + 11 + 8 * i;
        __uint128_t product = (__uint128_t)(digest->lanes[i] ^ word(key)) * (digest->lanes[i + 1] ^ word(key + 8));
        found += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    found = (found ^ found >> 37) * 0x165667919E3779F9;
    return found ^ found >> 32;
}

/* Copies and hashes one piece of a row, some bytes at a time: those that were hashed, while they are in the cache. */
static void digest_piece(Digest *digest, const uint8_t *from, int64_t bytes, const uint8_t *next, int64_t lead,
                         Output *output)
{
    lead = lead < bytes ? lead : bytes;
    for (int64_t at = 0, copied = 0; at < bytes; at += HASHED) {
        int64_t end = bytes - at < HASHED ? bytes : at + HASHED;
        digest_bytes(digest, from + at, end - at, at + lead < bytes ? from + at + lead : next + (at + lead - bytes));
        if (!output)
            continue;
        if (end < bytes) /* as far as whole lines of the output end */
            end -= ((intptr_t)output->to + output->held + end - copied) % LINE;
        append(output, from + copied, end - copied);
        copied = end;
    }
}

#define MOST_COPIED 4 /* pieces of a row; native.py has it, too */

/* Hashes rows of several pieces, and copies them, one after another to the place of each piece; nowhere if `to` is NULL.
 *
 * `rows`, `bytes`: (pieces, count). `to`: (pieces). `digests`: (count).
 */
EXPORT void fastload_digest(const uint8_t *const *rows, const int64_t *bytes, uint8_t *const *to, int64_t pieces,
                            int64_t count, int streams, uint64_t *digests)
{
    Output outputs[MOST_COPIED];
    for (int64_t piece = 0; to && piece < pieces; piece++)
        begin_output(&outputs[piece], to[piece], streams);
    for (int64_t i = 0; i < count; i++) {
        Digest digest;
        int64_t total = 0;
        for (int64_t at = i; at < pieces * count; at += count)
            total += bytes[at];
        begin_digest(&digest, total);
        for (int64_t piece = 0, at = i; piece < pieces; piece++, at += count) {
            const Ahead ahead = ahead_in(bytes[at], digest.is_long ? AHEAD_IN_LONG : AHEAD);
            const uint8_t *next = rows[piece * count + row_ahead(ahead, i, count)];
            digest_piece(&digest, rows[at], bytes[at], next, ahead.bytes, to ? &outputs[piece] : NULL);
        }
        digests[i] = end_digest(&digest);
    }
    for (int64_t piece = 0; to && piece < pieces; piece++)
        end_output(&outputs[piece]);
}

/* ---- Reading -------------------------------------------------------------------------------------------------------
 * Ranges of a file, one after another into memory. `done`: the bytes that came of each, fewer at its end or after an error.
 */
EXPORT void fastload_read(int file, const int64_t *offsets, const int64_t *lengths, int64_t count, uint8_t *to,
                          int64_t *done)
{
    for (int64_t i = 0; i < count; to += lengths[i], i++) {
        ssize_t some = 1;
        for (done[i] = 0; done[i] < lengths[i] && some > 0; done[i] += some > 0 ? some : 0) {
            do
                some = pread(file, to + done[i], (size_t)(lengths[i] - done[i]), (off_t)(offsets[i] + done[i]));
            while (some < 0 && errno == EINTR);
        }
    }
}

/* ---- Permuting -----------------------------------------------------------------------------------------------------
 * The rounds of plan/permutation.py, which says what they are: value by value, each until it falls below n.
 */
static inline uint64_t hashed(uint64_t digit, uint64_t key, uint64_t word, uint64_t final_word, uint64_t base)
{
    uint64_t step = (digit ^ key) * word;
    step = (step ^ step >> 32) * final_word >> 32;
    return step * base >> 32; /* in [0, base), without dividing */
}

/* A permutation of n values, as `_network` has it. */
typedef struct {
    uint64_t n, a, b;
    const uint64_t *words;
    int rounds;
    uint64_t final_word;
} Permutation;

/* The rounds come in pairs: one adds to the high digit, the next one to the low digit. */
static inline uint64_t permuted(const Permutation *by, uint64_t value, uint64_t key)
{
    do {
        uint64_t high = value / by->b, low = value % by->b;
        for (int at = 0; at < by->rounds; at += 2) {
            high += hashed(low, key, by->words[at], by->final_word, by->a);
            high -= by->a & -(uint64_t)(high >= by->a);
            low += hashed(high, key, by->words[at + 1], by->final_word, by->b);
            low -= by->b & -(uint64_t)(low >= by->b);
        }
        value = high * by->b + low;
    } while (value >= by->n);
    return value;
}

static inline uint64_t unpermuted(const Permutation *by, uint64_t value, uint64_t key)
{
    do {
        uint64_t high = value / by->b, low = value % by->b;
        for (int at = by->rounds - 2; at >= 0; at -= 2) {
            low -= hashed(high, key, by->words[at + 1], by->final_word, by->b);
            low += by->b & -(low >> 63);
            high -= hashed(low, key, by->words[at], by->final_word, by->a);
            high += by->a & -(high >> 63);
        }
        value = high * by->b + low;
    } while (value >= by->n);
    return value;
}

EXPORT void fastload_permute(uint64_t *values, int64_t count, uint64_t n, uint64_t a, uint64_t b, const uint64_t *keys,
                             int one_key, const uint64_t *words, int rounds, uint64_t final_word, int backwards)
{
    const Permutation by = {n, a, b, words, rounds, final_word};
    for (int64_t i = 0; i < count; i++) {
        const uint64_t key = keys[one_key ? 0 : i];
        values[i] = backwards ? unpermuted(&by, values[i], key) : permuted(&by, values[i], key);
    }
}

/* The rows at positions of one window, as `ChunkOrder` of plan/chunk_order.py mixes them; returns how many positions,
 * from the first on, are in the window.
 *
 * `gaps`: pairs of the slot at which empty ones begin, and how many. `begins`: the first row of each chunk, from the one
 * that the window begins with, which is `first_chunk` of the sequence.
 */
EXPORT int64_t fastload_window_rows(const int64_t *positions, int64_t count, int64_t first, uint64_t n, uint64_t a,
                                    uint64_t b, uint64_t key, const uint64_t *words, int rounds, uint64_t final_word,
                                    const int64_t *gaps, int64_t num_gaps, int64_t chunk_rows, int64_t first_chunk,
                                    const int64_t *begins, int64_t *rows)
{
    const Permutation by = {n, a, b, words, rounds, final_word};
    for (int64_t i = 0; i < count; i++) {
        const uint64_t within = (uint64_t)(positions[i] - first);
        if (within >= n)
            return i;
        int64_t slot = first + (int64_t)permuted(&by, within, key);
        for (int64_t gap = 0; gap < num_gaps; gap++)
            slot += slot >= gaps[2 * gap] ? gaps[2 * gap + 1] : 0;
        int64_t chunk = slot / chunk_rows;
        rows[i] = begins[chunk - first_chunk] + slot - chunk * chunk_rows;
    }
    return count;
}

/* ---- Random numbers of transforms ----------------------------------------------------------------------------------
 * As `transforms/draws.py` draws them, and as the transforms of `transforms/geometry.py` place images with them.
 */
static inline uint64_t mixed(uint64_t word)
{
    word += 0x9E3779B97F4A7C15;
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9;
    word = (word ^ word >> 27) * 0x94D049BB133111EB;
    return word ^ word >> 31;
}

static inline uint64_t drawn_bits(uint64_t key)
{
    return mixed(key ^ 0xD1B54A32D192ED03);
}

static inline double drawn_uniform(uint64_t key)
{
    return (double)(drawn_bits(key) >> 11) * 0x1p-53;
}

/* A number from 0 to below `high`, which is below 2^32. */
static inline int64_t drawn_below(uint64_t key, int64_t high)
{
    uint64_t bits = drawn_bits(key), wide = (uint64_t)high;
    return (int64_t)(((bits >> 32) * wide + ((bits & 0xFFFFFFFF) * wide >> 32)) >> 32);
}

/* Keys (echoes, count) of samples; `times` may be NULL. */
EXPORT void fastload_draw_keys(uint64_t seed, uint64_t epoch, const int64_t *rows, const int64_t *times, int64_t count,
                               uint64_t echo, int64_t echoes, uint64_t *keys)
{
    uint64_t key = mixed(mixed(seed) ^ epoch);
    for (int64_t i = 0; i < count; i++) {
        uint64_t of_row = mixed((uint64_t)rows[i] ^ key);
        if (times && times[i] > 0)
            of_row = mixed(of_row ^ (uint64_t)times[i] * 0xA0761D6478BD642F);
        for (int64_t use = 0; use < echoes; use++)
            keys[use * count + i] = mixed(of_row ^ (echo + (uint64_t)use));
    }
}

/* Mixes each word after an exclusive or with one: keys of a stream, or the bits of a number. */
EXPORT void fastload_draw_mixed(const uint64_t *words, int64_t count, uint64_t with, uint64_t *output)
{
    for (int64_t i = 0; i < count; i++)
        output[i] = mixed(words[i] ^ with);
}

/* Bounds of a rectangle's part of an area, and of the logarithm of its first over its second side. */
typedef struct {
    double scale[2], log_ratio[2];
} Shape;

enum { FLIP, RANDOM_CROP, CENTER_CROP, RESIZE, RANDOM_RESIZED_CROP };

/* A transform that moves pixels. First numbers count rows, second ones columns. */
typedef struct {
    int64_t kind;
    uint64_t stream;
    int64_t size[2];      /* of the output; of a resize to one shorter side that side, and 0 */
    int64_t padding[4];   /* of a random crop: top, left, bottom, right */
    int64_t option;       /* of a flip its axis; of a random crop whether it pads if needed; of a resize its max_size or 0 */
    double p;             /* of a flip */
    Shape shape;          /* of a random resized crop, and its ratios */
    double ratio[2];
} Move;

/* Part of a number in which two exponential functions, of some 1e-16 each, may lie to either side of a tie. */
#define UNSURE 1e-12

/* e^x to some 1e-15, for |x| below 700: whatever rounding depends on it is left to NumPy. */
static double exponential(double x)
{
    double twos = (double)(int64_t)(x * 1.4426950408889634 + (x < 0 ? -0.5 : 0.5));
    double rest = x - twos * 6.93147180369123816490e-01 - twos * 1.90821492927058770002e-10, sum = 1;
    for (int i = 13; i > 0; i--)
        sum = 1 + sum * rest * (1.0 / i);
    uint64_t bits = (uint64_t)((int64_t)twos + 1023) << 52;
    double power;
    memcpy(&power, &bits, sizeof power);
    return sum * power;
}

/* Rounded to nearest, half to even, as rint does; 0 to 2^52. */
static int64_t nearest(double x)
{
    return (int64_t)((x + 0x1p52) - 0x1p52);
}

enum { NOT_FOUND, FOUND, NOT_SURE };

/* The square root of an area, rounded to nearest, if that lies within bounds. */
static int drawn_side(double area, int64_t least, int64_t most, int64_t *side)
{
    double root = __builtin_sqrt(area);
    if (!(root < (double)most + 1))
        return NOT_FOUND;
    *side = (int64_t)(root + 0.5);
    double part = root + 0.5 - (double)*side;
    if (part < UNSURE * (root + 1) || part > 1 - UNSURE * (root + 1))
        return NOT_SURE;
    return *side >= least && *side <= most ? FOUND : NOT_FOUND;
}

/* Two sides of a rectangle within bounds, as `draws.rectangle_sides` draws them by ten attempts. */
static int draw_rectangle(const Shape *shape, uint64_t key, int64_t area, int64_t least, int64_t most_first,
                          int64_t most_second, int64_t *first, int64_t *second)
{
    for (uint64_t attempt = 0; attempt < 10; attempt++) {
        double scale = drawn_uniform(mixed(key ^ 2 * attempt)), ratio = drawn_uniform(mixed(key ^ (2 * attempt + 1)));
        double part = (double)area * (shape->scale[0] + (shape->scale[1] - shape->scale[0]) * scale);
        double log_ratio = shape->log_ratio[0] + (shape->log_ratio[1] - shape->log_ratio[0]) * ratio;
        if (!(log_ratio > -700 && log_ratio < 700))
            return NOT_SURE;
        double quotient = exponential(log_ratio);
        int one = drawn_side(part * quotient, least, most_first, first);
        int other = drawn_side(part / quotient, least, most_second, second);
        if (one == NOT_SURE || other == NOT_SURE)
            return NOT_SURE;
        if (one && other)
            return FOUND;
    }
    return NOT_FOUND;
}

/* Draws two sides, (count, 2), and whether they were found, (count,); else they are 0. `areas` and `most` are so many
 * numbers apart, 0: all have one. Returns 0 where a number is not sure: NumPy draws them then. */
EXPORT int fastload_draw_sides(const uint64_t *keys, int64_t count, const int64_t *areas, int64_t areas_step,
                               const Shape *shape, int64_t least, const int64_t *most, int64_t most_step,
                               int64_t *sides, uint8_t *found)
{
    for (int64_t i = 0; i < count; i++, areas += areas_step, most += most_step, sides += 2) {
        int drawn = draw_rectangle(shape, keys[i], *areas, least, most[0], most[1], sides, sides + 1);
        if (drawn == NOT_SURE)
            return 0;
        found[i] = drawn == FOUND;
        if (!found[i])
            sides[0] = sides[1] = 0;
    }
    return 1;
}

/* The window of a random resized crop in an image: its first row and column, and its size. 0: it is not sure. */
static int draw_resized_crop(const Move *move, uint64_t key, const int64_t *size, int64_t *first, int64_t *window)
{
    int found = draw_rectangle(&move->shape, key, size[0] * size[1], 1, size[1], size[0], window + 1, window);
    if (found == NOT_SURE)
        return 0;
    if (!found) { /* the largest central part */
        double ratio = (double)size[1] / (double)size[0];
        window[0] = ratio < move->ratio[0] ? nearest((double)size[1] / move->ratio[0]) : size[0];
        window[1] = ratio > move->ratio[1] ? nearest((double)size[0] * move->ratio[1]) : size[1];
    }
    for (int axis = 0; axis < 2; axis++) {
        window[axis] = window[axis] < 1 ? 1 : window[axis];
        int64_t room = size[axis] - window[axis];
        first[axis] = found ? drawn_below(mixed(key ^ (uint64_t)(20 + axis)), room + 1) : room / 2;
    }
    return 1;
}

/* The size of an image whose shorter side becomes one number; `max_size` is of the longer one, 0: there is none. */
static void resized_size(const int64_t *size, int64_t side, int64_t max_size, int64_t *target)
{
    int upright = size[0] <= size[1];
    int64_t shorter = side, longer = (int64_t)((double)(side * size[upright]) / (double)size[!upright]);
    if (max_size && longer > max_size) {
        shorter = (int64_t)((double)(max_size * shorter) / (double)longer);
        longer = max_size;
    }
    target[!upright] = shorter < 1 ? 1 : shorter;
    target[upright] = longer;
}

/* Places samples by moves, one after the other, as `geometry.joint_placement` does where at most one resizes.
 *
 * sizes: of the images, `sizes_step` numbers apart, 0: all have one.
 * placed: (4, count, 2), first, window, scaled, offset; turned: (count, 2).
 * table: (count, 10), the same numbers of each sample side by side; may be NULL.
 * Returns 0 where a number is not sure, or a window does not fit: NumPy draws them then.
 */
EXPORT int fastload_draw_placement(const uint64_t *keys, int64_t count, const int64_t *sizes, int64_t sizes_step,
                                   const Move *moves, int64_t num_moves, int64_t *placed, uint8_t *turned,
                                   int32_t *table)
{
    int64_t *firsts = placed, *windows = placed + 2 * count, *scaled = windows + 2 * count;
    int64_t *offsets = scaled + 2 * count;
    for (int64_t i = 0; i < count; i++, sizes += sizes_step, firsts += 2, windows += 2, scaled += 2, offsets += 2,
                 turned += 2) {
        int64_t size[2] = {sizes[0], sizes[1]}; /* before a move */
        for (int axis = 0; axis < 2; axis++) {
            firsts[axis] = offsets[axis] = turned[axis] = 0;
            windows[axis] = scaled[axis] = size[axis];
        }
        for (const Move *move = moves; move < moves + num_moves; move++) {
            uint64_t key = mixed(keys[i] ^ move->stream);
            int64_t first[2] = {0, 0}, window[2] = {size[0], size[1]}, target[2] = {move->size[0], move->size[1]};
            switch (move->kind) {
            case FLIP:
                memcpy(target, size, sizeof target);
                break;
            case RANDOM_CROP:
                for (int axis = 0; axis < 2; axis++) {
                    int64_t before = move->padding[axis], after = move->padding[2 + axis];
                    int64_t missing = target[axis] - (size[axis] + before + after);
                    if (missing > 0 && move->option)
                        before += missing, after += missing;
                    int64_t room = size[axis] + before + after - target[axis] + 1;
                    if (room < 1)
                        return 0;
                    first[axis] = drawn_below(mixed(key ^ (uint64_t)axis), room) - before;
                    window[axis] = target[axis];
                }
                break;
            case CENTER_CROP:
                for (int axis = 0; axis < 2; axis++) {
                    int64_t half = (size[axis] - target[axis]) >> 1; /* of an odd rest the even one, as rint rounds */
                    first[axis] = half + ((size[axis] - target[axis]) & half & 1);
                    window[axis] = target[axis];
                }
                break;
            case RESIZE:
                if (!target[1])
                    resized_size(size, target[0], move->option, target);
                break;
            default:
                if (!draw_resized_crop(move, key, size, first, window))
                    return 0;
            }
            /* The window lies in the output of the moves before, which may be turned, and be a part of what is resized. */
            for (int axis = 0; axis < 2; axis++) {
                int64_t at = turned[axis] ? size[axis] - first[axis] - window[axis] : first[axis];
                offsets[axis] += at;
                if (windows[axis] == scaled[axis]) {
                    firsts[axis] += offsets[axis];
                    windows[axis] = window[axis];
                    scaled[axis] = target[axis];
                    offsets[axis] = 0;
                }
                size[axis] = target[axis];
            }
            if (move->kind == FLIP)
                turned[move->option] ^= drawn_uniform(key) < move->p;
        }
        for (int axis = 0; table && axis < 2; axis++, table++) {
            table[0] = (int32_t)firsts[axis];
            table[2] = (int32_t)windows[axis];
            table[4] = (int32_t)scaled[axis];
            table[6] = (int32_t)offsets[axis];
            table[8] = turned[axis];
        }
        table += table ? 8 : 0;
    }
    return 1;
}

/* ---- Checksums -----------------------------------------------------------------------------------------------------
 * CRC-32C (Castagnoli's polynomial, bits reflected), with which TFRecord checks its records.
 */
#ifdef HAS_AVX2_CODE
#ifdef __clang__
#define SSE42 __attribute__((target("sse4.2,crc32"))) /* since clang 14 the instructions need both */
#else
#define SSE42 __attribute__((target("sse4.2")))
#endif

SSE42 static uint32_t crc32c_sse42(uint32_t crc, const uint8_t *data, int64_t size)
{
    uint64_t state = crc;
    for (; size >= 8; data += 8, size -= 8) {
        uint64_t word;
        memcpy(&word, data, 8);
        state = _mm_crc32_u64(state, word);
    }
    for (; size > 0; data++, size--)
        state = _mm_crc32_u8((uint32_t)state, *data);
    return (uint32_t)state;
}
#endif

/* `table`: of each byte, as sources/records.py makes it. */
EXPORT uint32_t fastload_crc32c(const uint8_t *data, int64_t size, const uint32_t *table)
{
    uint32_t crc = 0xFFFFFFFF;
#ifdef HAS_AVX2_CODE
    if (__builtin_cpu_supports("sse4.2"))
        return ~crc32c_sse42(crc, data, size);
#endif
    for (int64_t i = 0; i < size; i++)
        crc = table[(crc ^ data[i]) & 0xFF] ^ crc >> 8;
    return ~crc;
}

/* ---- Resizing ------------------------------------------------------------------------------------------------------
 * Antialiased and bilinear, axis by axis: an output level is a mean of the window's levels, weighted by a triangle
 * around its centre that is as wide as the window is larger than the output (Pillow's and torchvision's filter).
 * Weights are whole numbers of 16 bits, scaled by a power of two that is chosen for each axis; levels are rounded to 8
 * bits after each axis. torch's resize of uint8 computes the same.
 */

/* The weights of one axis of a resize. */
typedef struct {
    int64_t count;     /* output lines or columns */
    int64_t stride;    /* weights kept for each, a multiple of 4; those behind its last tap are 0 */
    int precision;     /* weights are multiples of 2^-precision */
    int64_t *first;    /* first input of each */
    int64_t *taps;     /* how many inputs each has */
    int16_t *weights;  /* (count, stride) */
} Axis;

/* Memory that grows as it is needed. */
typedef struct {
    void *memory;
    size_t size;
} Buffer;

static void *room(Buffer *buffer, size_t size)
{
    if (buffer->size < size) {
        free(buffer->memory);
        buffer->memory = NULL;
        if (posix_memalign(&buffer->memory, 64, size))
            buffer->memory = NULL;
        buffer->size = buffer->memory ? size : 0;
    }
    return buffer->memory;
}

/* Makes the weights of `shown` outputs from `begin` on, of `output` in all that show `input` inputs. 0: no memory. */
static int make_axis(Axis *axis, Buffer *buffer, int64_t input, int64_t output, int64_t begin, int64_t shown)
{
    double scale = (double)input / (double)output;
    double support = scale > 1.0 ? scale : 1.0, inverse = scale > 1.0 ? 1.0 / scale : 1.0;
    int64_t most = (int64_t)support * 2 + 3;
    int64_t stride = (most + 3) / 4 * 4;
    size_t exact_bytes = sizeof(double) * (size_t)(stride * output), index_bytes = sizeof(int64_t) * (size_t)output;
    size_t weight_bytes = sizeof(int16_t) * (size_t)(stride * output);
    char *memory = room(buffer, exact_bytes + 2 * index_bytes + weight_bytes + PADDING);
    if (!memory)
        return 0;
    double *exact = (double *)memory;
    axis->first = (int64_t *)(memory + exact_bytes);
    axis->taps = (int64_t *)(memory + exact_bytes + index_bytes);
    axis->weights = (int16_t *)(memory + exact_bytes + 2 * index_bytes);
    axis->count = shown;
    axis->stride = stride;
    double largest = 0.0;
    int64_t widest = 1;
    for (int64_t i = 0; i < output; i++) {
        double centre = scale * ((double)i + 0.5), total = 0.0;
        int64_t first = (int64_t)(centre - support + 0.5), stop = (int64_t)(centre + support + 0.5);
        if (first < 0)
            first = 0;
        if (stop > input)
            stop = input;
        int64_t taps = stop - first;
        double *line = exact + i * stride;
        for (int64_t j = 0; j < taps; j++) {
            double distance = ((double)(j + first) - centre + 0.5) * inverse;
            distance = distance < 0.0 ? -distance : distance;
            double weight = distance < 1.0 ? 1.0 - distance : 0.0;
            line[j] = weight;
            total += weight;
        }
        for (int64_t j = 0; j < taps; j++) {
            line[j] /= total;
            if (line[j] > largest)
                largest = line[j];
        }
        if (i >= begin && i < begin + shown) {
            axis->first[i - begin] = first;
            axis->taps[i - begin] = taps;
            if (taps > widest)
                widest = taps;
        }
    }
    int precision = 0;
    while (precision < 22 && (int64_t)(0.5 + largest * (double)((int64_t)1 << (precision + 1))) < (1 << 15))
        precision++;
    axis->precision = precision;
    axis->stride = (widest + 3) / 4 * 4;
    double unit = (double)((int64_t)1 << precision);
    for (int64_t i = 0; i < shown; i++) {
        double *line = exact + (i + begin) * stride;
        int16_t *weights = axis->weights + i * axis->stride;
        int64_t taps = axis->taps[i];
        for (int64_t j = 0; j < axis->stride; j++)
            weights[j] = j < taps ? (int16_t)(line[j] * unit + 0.5) : 0;
    }
    return 1;
}

static inline uint8_t level(int32_t sum, int precision)
{
    sum >>= precision;
    return (uint8_t)(sum < 0 ? 0 : sum > 255 ? 255 : sum);
}

/* One output line of `values` levels: the mean of `taps` input lines, `stride` bytes apart. */
static void mean_of_lines(const uint8_t *input, int64_t stride, const int16_t *weights, int64_t taps, int precision,
                          uint8_t *output, int64_t values)
{
    int32_t sums[256];
    for (int64_t begin = 0; begin < values; begin += 256) {
        int64_t count = values - begin < 256 ? values - begin : 256;
        for (int64_t i = 0; i < count; i++)
            sums[i] = 1 << (precision - 1);
        for (int64_t k = 0; k < taps; k++) {
            const uint8_t *line = input + k * stride + begin;
            int32_t weight = weights[k];
            for (int64_t i = 0; i < count; i++)
                sums[i] += weight * line[i];
        }
        for (int64_t i = 0; i < count; i++)
            output[begin + i] = level(sums[i], precision);
    }
}

/* One line: each output pixel is the mean of input pixels beside one another. */
static void mean_of_columns(const uint8_t *input, const Axis *axis, int64_t channels, uint8_t *output)
{
    for (int64_t x = 0; x < axis->count; x++) {
        const int16_t *weights = axis->weights + x * axis->stride;
        const uint8_t *pixels = input + axis->first[x] * channels;
        for (int64_t c = 0; c < channels; c++) {
            int32_t sum = 1 << (axis->precision - 1);
            for (int64_t k = 0; k < axis->taps[x]; k++)
                sum += weights[k] * pixels[k * channels + c];
            output[x * channels + c] = level(sum, axis->precision);
        }
    }
}

#ifdef HAS_AVX2_CODE
AVX2 static void mean_of_lines_avx2(const uint8_t *input, int64_t stride, const int16_t *weights, int64_t taps,
                                    int precision, uint8_t *output, int64_t values)
{
    const __m256i half = _mm256_set1_epi32(1 << (precision - 1));
    const __m128i shift = _mm_cvtsi32_si128(precision);
    for (int64_t i = 0; i < values; i += 16) {
        if (i + 16 > values)
            i = values - 16; /* the last vector overlaps the one before */
        __m256i low = half, high = half;
        const uint8_t *at = input + i;
        int64_t k = 0;
        for (; k + 2 <= taps; k += 2, at += 2 * stride) {
            __m128i a = _mm_loadu_si128((const __m128i *)at), b = _mm_loadu_si128((const __m128i *)(at + stride));
            __m256i both = _mm256_set1_epi32((uint16_t)weights[k] | ((int32_t)weights[k + 1] << 16));
            low = _mm256_add_epi32(low, _mm256_madd_epi16(_mm256_cvtepu8_epi16(_mm_unpacklo_epi8(a, b)), both));
            high = _mm256_add_epi32(high, _mm256_madd_epi16(_mm256_cvtepu8_epi16(_mm_unpackhi_epi8(a, b)), both));
        }
        if (k < taps) {
            __m128i a = _mm_loadu_si128((const __m128i *)at), b = _mm_setzero_si128();
            __m256i one = _mm256_set1_epi32((uint16_t)weights[k]);
            low = _mm256_add_epi32(low, _mm256_madd_epi16(_mm256_cvtepu8_epi16(_mm_unpacklo_epi8(a, b)), one));
            high = _mm256_add_epi32(high, _mm256_madd_epi16(_mm256_cvtepu8_epi16(_mm_unpackhi_epi8(a, b)), one));
        }
        low = _mm256_sra_epi32(low, shift);
        high = _mm256_sra_epi32(high, shift);
        /* packs works in halves of 128 bits: low 0-3, high 8-11, low 4-7, high 12-15. */
        __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xD8);
        _mm_storeu_si128((__m128i *)(output + i),
                         _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
    }
}

/* Two lines of RGB at a time. Lines may be read PADDING bytes beyond their end; outputs are written 1 byte beyond it. */
AVX2 static void mean_of_columns_avx2(const uint8_t *one, const uint8_t *two, const Axis *axis, uint8_t *output_one,
                                      uint8_t *output_two)
{
    const __m256i half = _mm256_set1_epi32(1 << (axis->precision - 1));
    const __m128i shift = _mm_cvtsi32_si128(axis->precision);
    /* Of four pixels RGB RGB RGB RGB: pairs of reds, greens and blues as 16 bits each. */
    const __m256i first = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1));
    const __m256i second = _mm256_broadcastsi128_si256(_mm_setr_epi8(6, -1, 9, -1, 7, -1, 10, -1, 8, -1, 11, -1, -1, -1, -1, -1));
    const __m256i bytes = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
    for (int64_t x = 0; x < axis->count; x++) {
        const int16_t *weights = axis->weights + x * axis->stride;
        const int16_t *stop = weights + axis->taps[x]; /* behind at least one */
        int64_t at = axis->first[x] * 3;
        __m256i sum = half;
        do {
            __m256i pixels = _mm256_inserti128_si256(
                _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(one + at))),
                _mm_loadu_si128((const __m128i *)(two + at)), 1);
            float these, next; /* pairs of weights: as floats each is loaded into all lanes at once */
            memcpy(&these, weights, sizeof these);
            memcpy(&next, weights + 2, sizeof next);
            __m256i these_weights = _mm256_castps_si256(_mm256_set1_ps(these));
            __m256i next_weights = _mm256_castps_si256(_mm256_set1_ps(next));
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_shuffle_epi8(pixels, first), these_weights));
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_shuffle_epi8(pixels, second), next_weights));
            weights += 4;
            at += 12;
        } while (weights < stop);
        sum = _mm256_shuffle_epi8(_mm256_sra_epi32(sum, shift), bytes);
        int32_t a = _mm_cvtsi128_si32(_mm256_castsi256_si128(sum));
        int32_t b = _mm_cvtsi128_si32(_mm256_extracti128_si256(sum, 1));
        memcpy(output_one + 3 * x, &a, 4);
        memcpy(output_two + 3 * x, &b, 4);
    }
}
#endif

static void lines(const uint8_t *input, int64_t stride, const Axis *axis, int64_t y, uint8_t *output, int64_t values)
{
    const uint8_t *first = input + axis->first[y] * stride;
    const int16_t *weights = axis->weights + y * axis->stride;
#ifdef HAS_AVX2_CODE
    if (values >= 16 && has_avx2()) {
        mean_of_lines_avx2(first, stride, weights, axis->taps[y], axis->precision, output, values);
        return;
    }
#endif
    mean_of_lines(first, stride, weights, axis->taps[y], axis->precision, output, values);
}

static void columns(const uint8_t *one, const uint8_t *two, const Axis *axis, int64_t channels, uint8_t *output_one,
                    uint8_t *output_two)
{
#ifdef HAS_AVX2_CODE
    if (channels == 3 && has_avx2()) {
        mean_of_columns_avx2(one, two, axis, output_one, output_two);
        return;
    }
#endif
    mean_of_columns(one, axis, channels, output_one);
    if (two != one)
        mean_of_columns(two, axis, channels, output_two);
}

static void mirror(const uint8_t *input, int64_t width, int64_t channels, uint8_t *output)
{
    if (channels == 3)
        for (int64_t x = 0; x < width; x++)
            for (int c = 0; c < 3; c++)
                output[3 * x + c] = input[3 * (width - 1 - x) + c];
    else
        for (int64_t x = 0; x < width; x++)
            for (int64_t c = 0; c < channels; c++)
                output[channels * x + c] = input[channels * (width - 1 - x) + c];
}

#ifdef HAS_AVX2_CODE
AVX2 static void normalize_avx2(const uint8_t *levels, const float *scale, const float *shift, float *to,
                                int64_t values, int streams)
{
    if (streams && values % 8 == 0 && ((intptr_t)to & 31) == 0) {
        for (int64_t i = 0; i < values; i += 8) {
            __m256 exact = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(levels + i))));
            exact = _mm256_fmadd_ps(exact, _mm256_loadu_ps(scale + i), _mm256_loadu_ps(shift + i));
            _mm256_stream_ps(to + i, exact);
        }
        return;
    }
    for (int64_t i = 0; i < values; i++)
        to[i] = __builtin_fmaf((float)levels[i], scale[i], shift[i]);
}
#endif

/* With `streams` past the CPU's cache, as copies of rows are. */
static void normalize(const uint8_t *levels, const float *scale, const float *shift, float *to, int64_t values,
                      int streams)
{
#ifdef HAS_AVX2_CODE
    if (has_avx2()) {
        normalize_avx2(levels, scale, shift, to, values, streams);
        return;
    }
#endif
    (void)streams;
    for (int64_t i = 0; i < values; i++)
        to[i] = (float)levels[i] * scale[i] + shift[i];
}

/* ---- Whole images ------------------------------------------------------------------------------------------------ */

/* How finished lines of levels leave: as they are, or times scale plus shift as float32 or bfloat16. */
typedef struct {
    int kind; /* 0 uint8, 1 float32, 2 bfloat16 */
    int64_t values, channels;
    const float *scale, *shift; /* (values,) each */
    uint8_t *turned;            /* room for a line */
    int streams;                /* float32 leaves past the cache */
} Sink;

static void put(const Sink *sink, const uint8_t *levels, int mirrored, uint8_t *output)
{
    if (mirrored) {
        mirror(levels, sink->values / sink->channels, sink->channels, sink->kind ? sink->turned : output);
        levels = sink->turned;
        if (!sink->kind)
            return;
    }
    if (sink->kind == 0) {
        memcpy(output, levels, (size_t)sink->values);
    } else if (sink->kind == 1) {
        normalize(levels, sink->scale, sink->shift, (float *)output, sink->values, sink->streams);
    } else {
        float exact[256];
        for (int64_t begin = 0; begin < sink->values; begin += 256) {
            int64_t count = sink->values - begin < 256 ? sink->values - begin : 256;
            normalize(levels + begin, sink->scale + begin, sink->shift + begin, exact, count, 0);
            for (int64_t i = 0; i < count; i++) {
                uint32_t bits;
                memcpy(&bits, exact + i, 4);
                bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
                memcpy(output + 2 * (begin + i), &bits, 2);
            }
        }
    }
}


/* ---- JPEG --------------------------------------------------------------------------------------------------------
 * Decodes with libjpeg-turbo, which is neither linked nor needed to compile this: native.py loads the one that Pillow
 * brought, or the system's, and hands over its functions. As much of its structs as is used stands here, for its ABI of
 * 6.2, which Pillow and Debian build, and of 8, which Ubuntu builds. The library refuses any other size of its main
 * struct or version, and tests/system/test_native.py compares all of it with jpeglib.h.
 */

/* A JPEG of more scans is refused: each is a pass over the whole image (images/jpeg.py, MAX_SCANS). */
#define MAX_SCANS 500

/* The last year in its copyright of the oldest libjpeg-turbo that is used, 2.1.5: there is no number of its release. */
#define LEAST_YEAR 2023

enum { GRAYSCALE = 1, RGB = 2 }; /* J_COLOR_SPACE */
enum { ISLOW = 0 };              /* J_DCT_METHOD */
enum { HEADER_OK = 1 };          /* what jpeg_read_header returns */

typedef struct Errors Errors;

/* jpeg_decompress_struct. `unused` are numbers and pointers that are not looked at. */
typedef struct {
    Errors *err;
    void *mem, *progress, *client_data;
    int unused_state[2];
    void *src;
    unsigned image_width, image_height;
    int num_components, jpeg_color_space, out_color_space;
    unsigned scale_num, scale_denom;
    double output_gamma;
    int unused_output[2], dct_method, unused_choices[9];
    unsigned output_width, output_height;
    int unused_components, output_components, unused_colors[2];
    void *colormap;
    unsigned output_scanline;
    int input_scan_number, unused_progress[3];
    void *unused_tables[13];
    int data_precision;
    void *comp_info;
    int frame[2];       /* 6.2: progressive_mode, arith_code; 8: is_baseline, progressive_mode */
    uint64_t rest[64];  /* more than any release has */
} Decoder;

typedef struct {
    int version;        /* JPEG_LIB_VERSION */
    size_t size;        /* of jpeg_decompress_struct with pointers of 64 bits */
    int progressive;    /* which number of `frame` is progressive_mode */
} Layout;

static const Layout LAYOUTS[] = {{62, 632, 0}, {80, 656, 1}};
_Static_assert(sizeof(Decoder) >= 656, "a decoder has room for every layout");

/* libjpeg's functions that are used; native.py hands over as many, in this order. */
typedef struct {
    void *(*std_error)(Errors *);
    void (*create)(Decoder *, int, size_t);
    void (*destroy)(Decoder *);
    void (*mem_src)(Decoder *, const unsigned char *, unsigned long);
    int (*read_header)(Decoder *, int);
    int (*start)(Decoder *);
    unsigned (*read)(Decoder *, uint8_t **, unsigned);
    unsigned (*skip)(Decoder *, unsigned);
    void (*crop)(Decoder *, unsigned *, unsigned *);
    int (*finish)(Decoder *);
    void (*abort)(Decoder *);
} Functions;

/* Of the library that is used; no layout: none is. */
static Functions libjpeg;
static const Layout *layout;

/* Columns that are worth leaving out, and the fewest that are decoded then. */
#define LEAST_CUT 32

/* jpeg_error_mgr and jpeg_progress_mgr, and where to go on after an error. */
struct Errors {
    struct {
        void (*error_exit)(Decoder *);
        void (*emit_message)(Decoder *, int);
        void (*output_message)(Decoder *);
        void *unused_functions[2];
        int unused_message[22];
        long num_warnings;
        const char *const *jpeg_message_table;
        int last_jpeg_message;
        const char *const *addon_message_table;
        int unused_addons[2];
    } manager;
    struct {
        void (*progress_monitor)(Decoder *);
        long unused_counts[2];
        int unused_passes[2];
    } progress;
    jmp_buf back;
};

static void give_up(Decoder *info)
{
    longjmp(info->err->back, 1);
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* A warning (level -1) is of corrupt data, and as final as an error: the caller looks closer. */
static void no_warning(Decoder *info, int level)
{
    if (level < 0)
        give_up(info);
}

static void no_message(Decoder *info)
{
    (void)info;
}

static void limit_scans(Decoder *info)
{
    if (info->input_scan_number > MAX_SCANS)
        give_up(info);
}

/* Whether a library is new enough: its copyright, one of its messages, names it and years. */
static int is_new(const Errors *errors)
{
    int latest = 0;
    for (int i = 0; i <= errors->manager.last_jpeg_message; i++) {
        const char *text = errors->manager.jpeg_message_table[i];
        if (!text || !strstr(text, "Copyright") || !strstr(text, "libjpeg-turbo"))
            continue;
        for (int year = 0; *text; text++) {
            year = *text >= '0' && *text <= '9' ? (year * 10 + *text - '0') % 10000 : 0;
            latest = year > latest ? year : latest;
        }
    }
    return latest >= LEAST_YEAR;
}

/* 0: the library has another interface, or there is no memory. */
static int open_decoder(Decoder *info, Errors *errors, const Functions *functions, const Layout *expected)
{
    info->err = errors;
    functions->std_error(errors);
    errors->manager.error_exit = give_up;
    errors->manager.emit_message = no_warning;
    errors->manager.output_message = no_message;
    if (setjmp(errors->back))
        return 0;
    functions->create(info, expected->version, expected->size);
    errors->progress.progress_monitor = limit_scans;
    info->progress = &errors->progress;
    return 1;
}

/* Decodes the part of a JPEG of `height` x `width` that a window shows, in levels shrunk by `factor`.
 *
 * Pixels of the window are exactly those of the whole image. They begin at `*pixels`, lines `*stride` bytes apart.
 * 0: libjpeg refuses or warns of it, or it is not the image that is expected.
 */
static int decode_window(Decoder *info, Errors *errors, Buffer *buffer, const uint8_t *data,
                         int64_t size, int64_t height, int64_t width, int64_t channels, int64_t factor,
                         const int64_t *window, const uint8_t **pixels, int64_t *stride)
{
    int64_t top = window[0], left = window[1], rows = window[2], columns = window[3];
    if (setjmp(errors->back)) {
        libjpeg.abort(info);
        return 0;
    }
    libjpeg.mem_src(info, data, (unsigned long)size);
    if (libjpeg.read_header(info, 1) != HEADER_OK || info->image_height != height || info->image_width != width
        || (info->num_components != 1 && info->num_components != 3) || info->num_components > channels
        || info->data_precision != 8) {
        libjpeg.abort(info);
        return 0;
    }
    info->out_color_space = channels == 1 ? GRAYSCALE : RGB;
    info->scale_num = 1;
    info->scale_denom = (unsigned)factor;
    info->dct_method = ISLOW;
    libjpeg.start(info);
    /* What it will write: a lossless JPEG, for one, keeps its size. */
    if (info->output_width != (width + factor - 1) / factor || info->output_height != (height + factor - 1) / factor
        || info->output_components != channels || top + rows > info->output_height
        || left + columns > info->output_width)
        give_up(info);
    int64_t first = 0, full = info->output_width;
    /* Smooth upsampling looks at a neighbour on each side, so the part is wider than the window; and never narrow, since
     * libjpeg upsamples components of two columns or less in another way. */
    if (columns + LEAST_CUT < full && !info->frame[layout->progressive]) {
        int64_t begin = left > 0 ? left - 1 : 0, stop = left + columns + 1 < full ? left + columns + 1 : full;
        if (stop < begin + LEAST_CUT)
            stop = begin + LEAST_CUT < full ? begin + LEAST_CUT : full;
        if (begin > stop - LEAST_CUT)
            begin = stop - LEAST_CUT;
        unsigned at = (unsigned)begin, wide = (unsigned)(stop - begin);
        libjpeg.crop(info, &at, &wide);
        first = at;
    }
    int64_t line = (int64_t)info->output_width * channels + PADDING;
    uint8_t *memory = room(buffer, (size_t)((rows + 1) * line));
    if (!memory)
        give_up(info);
    if (top > 0 && libjpeg.skip(info, (unsigned)top) != (unsigned)top)
        give_up(info);
    for (int64_t row = 0; row < rows;) {
        uint8_t *lines[4];
        int64_t count = rows - row < 4 ? rows - row : 4;
        for (int64_t i = 0; i < count; i++)
            lines[i] = memory + (row + i) * line;
        row += libjpeg.read(info, lines, (unsigned)count);
    }
    if (info->output_scanline == info->output_height)
        libjpeg.finish(info);
    else
        libjpeg.abort(info);
    *pixels = memory + (left - first) * channels;
    *stride = line;
    return 1;
}

/* Increased with every change of these functions; native.py expects the same number. */
EXPORT int fastload_native_version(void)
{
    return 9;
}

/* Decodes with these functions of libjpeg from now on; 0: they are old, or of another interface, and nothing changes.
 * Not while another thread calls it or decodes. */
EXPORT int fastload_use_jpeg(void *const *functions)
{
    Functions given;
    memcpy(&given, functions, sizeof given);
    for (size_t i = 0; i < sizeof LAYOUTS / sizeof *LAYOUTS; i++) {
        Decoder info;
        Errors errors;
        if (!open_decoder(&info, &errors, &given, LAYOUTS + i))
            continue;
        given.destroy(&info);
        if (!is_new(&errors))
            return 0;
        libjpeg = given;
        layout = LAYOUTS + i;
        return 1;
    }
    return 0;
}

/* Columns of the table, a line for each image. BEGIN and BYTES say where it lies in `flat`. FACTOR: 0 of pixels, as they
 * are; of a JPEG by how much it is decoded smaller, and the window is in pixels of that; below 0 it is passed over. */
enum { BEGIN, BYTES, HEIGHT, WIDTH, FACTOR, TOP, LEFT, ROWS, COLS, DOWN, ACROSS, Y, X, FLIPPED, MIRRORED, COLUMNS };

/* Fills images (count, height, width, channels) of a kind; `scale` and `shift`, (width * channels,), are of a Normalize.
 *
 * status: (count,), 1 where an image was made, 0 where it has to be made in another way: libjpeg refuses or warns of it.
 * decoding_ns: what JPEGs took. Returns 0 if there is too little memory.
 */
EXPORT int fastload_place(const uint8_t *flat, const int64_t *table, int64_t count, uint8_t *output, int64_t channels,
                          int64_t height, int64_t width, int kind, const float *scale, const float *shift,
                          int streams, uint8_t *status, int64_t *decoding_ns)
{
    Decoder info;
    Errors errors;
    Buffer decoded_memory = {0};
    int opened = 0;
    Buffer down_memory = {0}, across_memory = {0}, middle_memory = {0}, line_memory = {0};
    int64_t values = width * channels, value_bytes = kind == 1 ? 4 : kind == 2 ? 2 : 1;
    int done = 0;
    *decoding_ns = 0;
    uint8_t *line = room(&line_memory, (size_t)(3 * (values + PADDING)));
    if (!line)
        goto end;
    Sink sink = {kind, values, channels, scale, shift, line + 2 * (values + PADDING), streams};
    uint8_t *line_two = line + values + PADDING;
    for (int64_t i = 0; i < count; i++, table += COLUMNS) {
        int64_t stride = table[WIDTH] * channels, window_height = table[ROWS], window_width = table[COLS];
        int64_t scaled_height = table[DOWN], scaled_width = table[ACROSS], y = table[Y], x = table[X];
        int flipped = table[FLIPPED] != 0, mirrored = table[MIRRORED] != 0;
        const uint8_t *window = flat + table[BEGIN] + table[TOP] * stride + table[LEFT] * channels;
        status[i] = 0;
        if (table[FACTOR] < 0)
            continue;
        if (table[FACTOR]) {
            if (!layout)
                continue;
            if (!opened && !(opened = open_decoder(&info, &errors, &libjpeg, layout)))
                goto end;
            int64_t begun_ns = now_ns();
            int decoded = decode_window(&info, &errors, &decoded_memory, flat + table[BEGIN], table[BYTES],
                                        table[HEIGHT], table[WIDTH], channels, table[FACTOR], table + TOP, &window,
                                        &stride);
            *decoding_ns += now_ns() - begun_ns;
            if (!decoded)
                continue;
        }
        uint8_t *image = output + i * height * values * value_bytes;
        int64_t step = values * value_bytes;
        if (flipped) {
            image += (height - 1) * step;
            step = -step;
        }
        int resized_down = window_height != scaled_height, resized_across = window_width != scaled_width;
        Axis down, across;
        if (resized_down && !make_axis(&down, &down_memory, window_height, scaled_height, y, height))
            goto end;
        if (resized_across && !make_axis(&across, &across_memory, window_width, scaled_width, x, width))
            goto end;
        if (!resized_across) {
            const uint8_t *from = window + x * channels;
            for (int64_t row = 0; row < height; row++) {
                const uint8_t *levels = from + (y + row) * stride;
                if (resized_down) {
                    lines(from, stride, &down, row, kind || mirrored ? line : image + row * step, values);
                    if (!kind && !mirrored)
                        continue;
                    levels = line;
                }
                put(&sink, levels, mirrored, image + row * step);
            }
        } else if (!resized_down || window_height > scaled_height) {
            /* Down first: fewer lines are left for the dearer axis. */
            int64_t window_values = window_width * channels;
            uint8_t *middle = room(&middle_memory, (size_t)(2 * (window_values + PADDING)));
            if (!middle)
                goto end;
            uint8_t *middle_two = middle + window_values + PADDING;
            for (int64_t row = 0; row < height; row += 2) {
                int64_t last = row + 1 < height ? row + 1 : row;
                if (resized_down) {
                    lines(window, stride, &down, row, middle, window_values);
                    lines(window, stride, &down, last, middle_two, window_values);
                } else {
                    memcpy(middle, window + (y + row) * stride, (size_t)window_values);
                    memcpy(middle_two, window + (y + last) * stride, (size_t)window_values);
                }
                columns(middle, middle_two, &across, channels, line, line_two);
                put(&sink, line, mirrored, image + row * step);
                if (last > row)
                    put(&sink, line_two, mirrored, image + last * step);
            }
        } else {
            /* The window gains lines, so across first: only those lines that are shown. */
            int64_t begin = down.first[0], stop = down.first[height - 1] + down.taps[height - 1];
            int64_t middle_stride = values + PADDING, window_values = window_width * channels;
            uint8_t *middle = room(&middle_memory,
                                   (size_t)((stop - begin + 2) * middle_stride + 2 * (window_values + PADDING)));
            if (!middle)
                goto end;
            uint8_t *copy = middle + (stop - begin + 2) * middle_stride, *copy_two = copy + window_values + PADDING;
            for (int64_t row = begin; row < stop; row += 2) {
                int64_t last = row + 1 < stop ? row + 1 : row;
                memcpy(copy, window + row * stride, (size_t)window_values);
                memcpy(copy_two, window + last * stride, (size_t)window_values);
                columns(copy, copy_two, &across, channels, middle + (row - begin) * middle_stride,
                        middle + (row - begin + 1) * middle_stride);
            }
            for (int64_t row = 0; row < height; row++) {
                int straight = !kind && !mirrored;
                lines(middle - begin * middle_stride, middle_stride, &down, row,
                      straight ? image + row * step : line, values);
                if (!straight)
                    put(&sink, line, mirrored, image + row * step);
            }
        }
        status[i] = 1;
    }
    done = 1;
#ifdef HAS_AVX2_CODE
    if (streams)
        _mm_sfence();
#endif
end:
    if (opened)
        libjpeg.destroy(&info);
    free(decoded_memory.memory);
    free(down_memory.memory);
    free(across_memory.memory);
    free(middle_memory.memory);
    free(line_memory.memory);
    return done;
}
