// Matrix products of the `cell` kernel, for a few sequences at once so that the weight is read once.
//
// The order of every sum is fixed and does not depend on the other sequences: results are the same bit
// for bit for a single sequence, in any batch, and token by token.

#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "vector.h"

namespace {

// Sums that are held in registers. AVX-512 has 32 registers, other CPUs have 16.
constexpr int REGISTER_SUMS = BYTES == 64 ? 16 : 8;
// Sequences that share one pass over the weight.
constexpr int GROUP_SIZE = 8;

// Cut a and b into parts of 2·half lanes, add the two halves of every part, and return all results in
// one vector: first the results of a, then of b.
template <class T, int half, int... lane>
inline Vec<T> fold_pair(Vec<T> a, Vec<T> b, std::integer_sequence<int, lane...>) {
    constexpr int parts_of_a = LANES<T> / (2 * half);
    constexpr auto find_lane = [](int i) {  // of a and b together
        const int part = i / half, first = part < parts_of_a ? 0 : LANES<T> - parts_of_a * 2 * half;
        return first + part * 2 * half + i % half;
    };
#ifdef __clang__  // no test compiles this branch: tests have only g++
    return __builtin_shufflevector(a, b, find_lane(lane)...) +
           __builtin_shufflevector(a, b, (find_lane(lane) + half)...);
#else  // g++ has __builtin_shufflevector only since version 12
    constexpr typename Float<T>::Bits low = {find_lane(lane)...}, high = {find_lane(lane) + half...};
    return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
#endif
}

// Return the vector of the sums of LANES vectors, each added in the same tree; overwrites them.
template <class T, int count = LANES<T>, int half = LANES<T> / 2> inline Vec<T> sum_each(Vec<T> *v) {
    if constexpr (count == 1) {
        return v[0];
    } else {
        for (int i = 0; i < count / 2; ++i)
            v[i] = fold_pair<T, half>(v[2 * i], v[2 * i + 1],
                                      std::make_integer_sequence<int, LANES<T>>{});
        return sum_each<T, count / 2, half / 2>(v);
    }
}

// out[s][j] += W_j · y_s for S sequences s. W: (rows, width); y: rows of `width` entries, padded with zeros
// to whole vectors. W is read once.
template <class T, int S>
void project_tile(const T *W, int64_t rows, int64_t width, const T *y, T *out, int64_t out_step) {
    constexpr int OUTPUTS = REGISTER_SUMS / S, L = LANES<T>;
    for (int64_t j = 0; j < rows; j += OUTPUTS) {
        const int64_t tile_size = std::min<int64_t>(OUTPUTS, rows - j);
        const T *row[OUTPUTS];
        for (int o = 0; o < OUTPUTS; ++o) row[o] = W + (j + std::min<int64_t>(o, tile_size - 1)) * width;
        Vec<T> sum[REGISTER_SUMS > L ? REGISTER_SUMS : L] = {};
        for (int64_t c = 0; c < width; c += L) {
            Vec<T> w[OUTPUTS];
            for (int o = 0; o < OUTPUTS; ++o) {
                w[o] = vector_at<T>(row[o] + c);
                __builtin_prefetch(row[o] + OUTPUTS * width + c);  // harmless beyond the end of W
            }
            for (int s = 0; s < S; ++s) {
                const Vec<T> y_s = vector_at<T>(y + s * width + c);
                for (int o = 0; o < OUTPUTS; ++o) sum[s * OUTPUTS + o] += w[o] * y_s;
            }
        }
        T total[REGISTER_SUMS > L ? REGISTER_SUMS : L];
        for (int i = 0; i < OUTPUTS * S; i += L) put<T>(total + i, sum_each<T>(sum + i));
        for (int s = 0; s < S; ++s)
            for (int64_t o = 0; o < tile_size; ++o) out[s * out_step + j + o] += total[s * OUTPUTS + o];
    }
}

// to[s] = Σ_j from[s][j] W_j for S sequences s. W: (rows, width); to: rows of `width`.
template <class T, int S>
void combine_weight_rows(const T *W, int64_t rows, int64_t width, const T *from, int64_t from_step, T *to) {
    constexpr int PANEL_VECTORS = REGISTER_SUMS / S > 8 ? 8 : REGISTER_SUMS / S, L = LANES<T>;
    constexpr int64_t PANEL_ROWS = 16;  // they stay in the cache for all columns
    std::fill(to, to + S * width, T(0));
    const auto panel = [&](int64_t first_row, int64_t end_row, int64_t c, auto vectors) {
        constexpr int V = decltype(vectors)::value;
        Vec<T> sum[S][V];
        for (int s = 0; s < S; ++s)
            for (int i = 0; i < V; ++i) sum[s][i] = vector_at<T>(to + s * width + c + i * L);
        for (int64_t j = first_row; j < end_row; ++j) {
            Vec<T> w[V];
            for (int i = 0; i < V; ++i) {
                w[i] = vector_at<T>(W + j * width + c + i * L);
                __builtin_prefetch(W + (j + PANEL_ROWS) * width + c + i * L);
            }
            for (int s = 0; s < S; ++s) {
                const T factor = from[s * from_step + j];
                for (int i = 0; i < V; ++i) sum[s][i] += factor * w[i];
            }
        }
        for (int s = 0; s < S; ++s)
            for (int i = 0; i < V; ++i) put<T>(to + s * width + c + i * L, sum[s][i]);
    };
    for (int64_t j = 0; j < rows; j += PANEL_ROWS) {
        const int64_t end_row = std::min(rows, j + PANEL_ROWS);
        int64_t c = 0;
        for (; c + PANEL_VECTORS * L <= width; c += PANEL_VECTORS * L)
            panel(j, end_row, c, std::integral_constant<int, PANEL_VECTORS>{});
        for (; c < width; c += L) panel(j, end_row, c, std::integral_constant<int, 1>{});
    }
}

// Rows and vectors of a tile of Σ_t factors_tᵀ y_t, which is summed in registers.
constexpr int TILE_ROWS = BYTES == 64 ? 6 : 4, TILE_VECTORS = BYTES == 64 ? 4 : 2;

// sums[j] += Σ_t factors[t][j] y[t] for `rows` (at most TILE_ROWS) rows j of TILE_VECTORS vectors. y, sums:
// consecutive rows of TILE_VECTORS vectors.
template <class T>
void outer_tile(const T *factors, int64_t factor_step, const T *y, int64_t tokens, int64_t rows, T *sums) {
    constexpr int L = LANES<T>;
    const T *column[TILE_ROWS];
    Vec<T> sum[TILE_ROWS][TILE_VECTORS];
    for (int j = 0; j < TILE_ROWS; ++j) {
        column[j] = factors + std::min<int64_t>(j, rows - 1);  // the last row again if there are fewer
        for (int i = 0; i < TILE_VECTORS; ++i)
            sum[j][i] = vector_at<T>(sums + (std::min<int64_t>(j, rows - 1) * TILE_VECTORS + i) * L);
    }
    for (int64_t t = 0; t < tokens; ++t) {
        Vec<T> v[TILE_VECTORS];
        for (int i = 0; i < TILE_VECTORS; ++i) v[i] = vector_at<T>(y + (t * TILE_VECTORS + i) * L);
        for (int j = 0; j < TILE_ROWS; ++j) {
            const T factor = column[j][t * factor_step];
            for (int i = 0; i < TILE_VECTORS; ++i) sum[j][i] += factor * v[i];
        }
    }
    for (int j = 0; j < rows; ++j)
        for (int i = 0; i < TILE_VECTORS; ++i) put<T>(sums + (j * TILE_VECTORS + i) * L, sum[j][i]);
}

// Divide a group of sequences into tiles, and call call(i, S) for the S sequences from i on. S is a
// compile-time constant.
template <class Call> inline void for_each_tile(int64_t sequences, Call call) {
    int64_t i = 0;
    const auto with = [&](auto S) {
        for (; i + S <= sequences; i += S) call(i, S);
    };
    if constexpr (REGISTER_SUMS == 16) with(std::integral_constant<int, 8>{});
    with(std::integral_constant<int, 4>{});
    with(std::integral_constant<int, 2>{});
    with(std::integral_constant<int, 1>{});
}

}  // namespace
