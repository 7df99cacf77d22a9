// Vectors of the CPU kernels: type, load and store, sum of lanes, exponential.
//
// The kernels are compiled without -ffast-math: NaN must be preserved, and `exponential` rounds to an
// integer by adding and subtracting a large number, which reassociation would remove.

#pragma once

#include <cstdint>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int BYTES = 64;
#elif defined(__AVX__)
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif

// Constants of `exponential`. round: 1.5 · 2^mantissa, after whose addition the last bits are the nearest
// integer. low, high: e^p is 0 below low, infinite above high. ln2_high + ln2_low is ln 2; k · ln2_high is
// exact.
template <class T> struct Float;
template <> struct Float<float> {
    typedef float Vec __attribute__((vector_size(BYTES)));
    typedef int32_t Bits __attribute__((vector_size(BYTES)));
    static constexpr int mantissa = 23;
    static constexpr float bias = 127, round = 12582912.0f, low = -88.0f, high = 88.8f;
    static constexpr float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
    // Minimax for (e^r - 1)/r on |r| <= ln 2 / 2, relative error of e^r 2e-9.
    static constexpr int terms = 6;
    static constexpr float series[terms] = {1.00000003f,     0.499999942f,   0.166664308f,
                                            0.0416680047f, 0.00837419571f, 0.00138436068f};
};
template <> struct Float<double> {
    typedef double Vec __attribute__((vector_size(BYTES)));
    typedef int64_t Bits __attribute__((vector_size(BYTES)));
    static constexpr int mantissa = 52;
    static constexpr double bias = 1023, round = 6755399441055744.0, low = -709.0, high = 710.0;
    static constexpr double ln2_high = 6.93145751953125e-1, ln2_low = 1.42860682030941723212e-6;
    static constexpr int terms = 13;  // Taylor: the next term is below the rounding error
    static constexpr double series[terms] = {
        1.0, 1.0 / 2, 1.0 / 6, 1.0 / 24, 1.0 / 120, 1.0 / 720, 1.0 / 5040, 1.0 / 40320,
        1.0 / 362880, 1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800.0};
};

template <class T> using Vec = typename Float<T>::Vec;
template <class T> constexpr int LANES = BYTES / sizeof(T);

// Limit p to [low, high]; NaN stays NaN.
template <class T> inline Vec<T> clamp(Vec<T> p) {
    const Vec<T> low = Vec<T>{} + Float<T>::low, high = Vec<T>{} + Float<T>::high;
#ifdef __AVX512F__  // g++ would use four instructions for these two, 10 % of the forward's time
    if constexpr (sizeof(T) == 4) return _mm512_min_ps(high, _mm512_max_ps(low, p));
    if constexpr (sizeof(T) == 8) return _mm512_min_pd(high, _mm512_max_pd(low, p));
#else
    p = low > p ? low : p;
    return high < p ? high : p;
#endif
}

// Return e^p: 0 below `low` (instead of denormal numbers), infinity above `high`, NaN for NaN, 1 for 0.
template <class T> inline Vec<T> exponential(Vec<T> p) {
    using F = Float<T>;
    p = clamp<T>(p);
    // The last bits of the sum are the biased exponent of 2^k; all zeros mean 0, all ones infinity.
    const Vec<T> shifted = p * T(1.4426950408889634) + (F::round + F::bias);
    const Vec<T> k = shifted - (F::round + F::bias);
    const Vec<T> r = (p - k * F::ln2_high) - k * F::ln2_low;
    Vec<T> s = Vec<T>{} + F::series[F::terms - 1];
    for (int i = F::terms - 2; i >= 0; --i) s = s * r + F::series[i];
    s = s * r + T(1);
    return s * (Vec<T>)((typename F::Bits)shifted << F::mantissa);
}

// Unaligned loads and stores use pointers to this type. With memcpy or v[i], g++ would keep v in memory,
// and a sum in a loop would go through memory in every step.
template <class T, int lanes> struct Unaligned {
    typedef T V __attribute__((vector_size(lanes * sizeof(T)), aligned(alignof(T)), may_alias));
};
template <class T, int lanes = LANES<T>> inline auto vector_at(const T *from) {
    return *reinterpret_cast<const typename Unaligned<T, lanes>::V *>(from);
}
template <class T, int lanes = LANES<T>, class V> inline void put(T *to, V v) {
    *reinterpret_cast<typename Unaligned<T, lanes>::V *>(to) = v;
}

// Load a block; lanes beyond the end of the array are zero. In the scan dt = 0 keeps their state zero.
template <class T> inline Vec<T> load(const T *from, int64_t lanes) {
    if (lanes == LANES<T>) return vector_at<T>(from);
    T part[LANES<T>] = {};
    for (int64_t i = 0; i < lanes; ++i) part[i] = from[i];
    return vector_at<T>(part);
}

template <class T> inline void store(T *to, Vec<T> v, int64_t lanes) {
    if (lanes == LANES<T>) return put<T>(to, v);
    T part[LANES<T>];
    put<T>(part, v);
    for (int64_t i = 0; i < lanes; ++i) to[i] = part[i];
}

// Set the lanes beyond the end of the array to zero, so that sums ignore them.
template <class T> inline Vec<T> zero_padding_lanes(Vec<T> v, int64_t lanes) {
    if (lanes == LANES<T>) return v;
    T part[LANES<T>];
    put<T>(part, v);
    return load<T>(part, lanes);
}

template <class T> const T *input(const void *p) { return static_cast<const T *>(p); }
template <class T> T *output(void *p) { return static_cast<T *>(p); }

// Return the sum of all lanes, by adding halves: log₂(lanes) steps.
template <class T, int lanes = LANES<T>, class V = Vec<T>> inline T sum_lanes(V v) {
    T all[lanes];
    put<T, lanes>(all, v);
    if constexpr (lanes == 2)
        return all[0] + all[1];
    else
        return sum_lanes<T, lanes / 2>(vector_at<T, lanes / 2>(all) +
                                    vector_at<T, lanes / 2>(all + lanes / 2));
}

}  // namespace
