// Backward pass of the `cell` kernel: backpropagation through time, from the last token to the first,
// with the implicit function theorem in each token (cell_gradient.h). States are recomputed from
// checkpoints, chunk by chunk. lm/kernels/cell_arguments.py lists the differentiable arguments.

#include "cell_gradient.h"

namespace {

// Backpropagate through one token of the i-th sequence of the group.
template <class T, int R>
void backprop_token(const Cell &p, int64_t row, int64_t t, int64_t i, const Token<T> &k, const T *H,
                Backward<T> &f, Sums<T> &sums, std::vector<double> &d_bc) {
    const int64_t d = p.channels, index = row * p.length + t;
    T *mu = f.mu + i * f.state, *d_row = out<T>(p.d_raw) + index * p.columns;
    const T *raw = p.saved_rows ? in<T>(p.saved_rows) + index * p.columns : in<T>(p.raw) + index * p.raw_step;
    std::fill(d_row, d_row + p.columns, T(0));
    TokenGradient s;
    T mean, inverse;
    gather_lambda<T>(p, index, i, f);
    if (p.kind == RNN)
        std::fill(f.mu_B, f.mu_B + d, T(0));
    else
        backprop_inflow<T>(p, k, mu, f);
    compute_v<T>(p, index, k, f.v, mean, inverse);
    compute_sums<T, R>(p, index, k, mean, inverse, f, s);
    solve_adjoint<R>(p, p.outcome[index] & FAILED, s);
    backprop_y<T, R>(p, index, row, k, inverse, f, s, sums, d_bc.data());
    backprop_map<T, R>(p, k, s);
    backprop_vectors<T, R>(p, index, raw, k, s, f);
    for (int64_t j = 0; j < p.rank; ++j) d_row[p.gates + j] = T(s.d_gate[j]);
    const T keep_t = p.keep ? in<T>(p.keep)[index] : T(1);
    if (p.kind == RNN) {
        const T *h = t ? in<T>(p.y) + (index - 1) * d : p.h0 ? in<T>(p.h0) + row * d : f.zeros;
        for (int64_t c = 0; c < d; ++c) {
            out<T>(p.dA)[index * d + c] = f.e[c] * h[c] * keep_t;
            mu[c] = f.e[c] * k.decay[c];
            out<T>(p.ddt)[index * d + c] = f.ddt[c];
        }
        return;
    }
    backprop_state<T>(p, k, keep_t, H, mu, f, &sums.dA[row * sums.A]);
    backprop_units<T>(p, f.dB, k.B, k.C, d_bc.data(), k.B_length, d_row + p.B_column);
    backprop_units<T>(p, f.dC, k.C, k.B, d_bc.data(), k.C_length, d_row + p.C_column);
    if (p.kind == MAMBA1)
        return void(std::memcpy(out<T>(p.ddt) + index * d, f.ddt, d * sizeof(T)));
    for (int64_t h = 0, wide = d / p.heads; h < p.heads; ++h) {
        T sum = 0;
        for (int64_t c = h * wide; c < (h + 1) * wide; ++c) sum += f.ddt[c];
        out<T>(p.ddt)[index * p.heads + h] = sum;
    }
}

// Backpropagate `carried`, the gradient of the vector that token t reads, through the centroids to
// y_{t−1}.
template <class T>
void backprop_centroids(const Cell &p, int64_t first, int64_t count, int64_t t, const Maps<T> &maps,
                       Backward<T> &f) {
    const int64_t k = p.centroids, d = p.channels, tokens = first * p.length + t;
    const int64_t step = p.length * k;
    T *d_logits = out<T>(p.d_logits) + tokens * k;
    for (int64_t i = 0; i < count; ++i) {
        std::memcpy(out<T>(p.d_reads) + (tokens + i * p.length) * d, f.carried + i * f.width,
                    d * sizeof(T));
        std::fill(d_logits + i * step, d_logits + i * step + k, T(0));
    }
    for_each_tile(count, [&](int64_t i, auto S) {
        const T *carried = f.carried + i * f.width;
        T *to = d_logits + i * step;
        project_some<T, decltype(S)::value>(maps.values, k, f.width, carried, to, step);
    });
    for (int64_t i = 0; i < count; ++i) {
        const T *alpha = in<T>(p.alphas) + tokens * k + i * step;
        T *d_logit = d_logits + i * step;
        Vec<T> sums{};
        for_each_block<T>(k, [&](int64_t j, int64_t lanes) {
            sums += load<T>(alpha + j, lanes) * load<T>(d_logit + j, lanes);
        });
        const T mean = sum_lanes<T>(sums);
        for (int64_t j = 0; j < k; ++j) d_logit[j] = alpha[j] * (d_logit[j] - mean);
    }
    for_each_tile(count, [&](int64_t i, auto S) {
        T *carried = f.carried + i * f.width;
        const T *from = d_logits + i * step;
        gather_some<T, decltype(S)::value>(maps.keys, k, f.width, from, step, carried);
    });
    for (int64_t i = 0; i < count && p.d_noise; ++i)
        std::memcpy(out<T>(p.d_noise) + (tokens + i * p.length) * d, f.carried + i * f.width,
                    d * sizeof(T));
}

// Compute `carried` of token t − 1 from the gradients of the rows of token t.
template <class T>
void carry_back(const Cell &p, int64_t first, int64_t count, int64_t t, const Maps<T> &maps,
           Backward<T> &f) {
    const int64_t step = p.length * p.columns;
    const T *rows = in<T>(p.d_raw) + (first * p.length + t) * p.columns;
    for_each_tile(count, [&](int64_t i, auto S) {
        gather_some<T, decltype(S)::value>(maps.W, p.y_columns, f.width, rows + i * step, step,
                                           f.carried + i * f.width);
    });
    if (p.centroids) backprop_centroids<T>(p, first, count, t, maps, f);
    for (int64_t i = 0; i < count; ++i) {
        T *carried = f.carried + i * f.width;
        const T times = p.keep ? in<T>(p.keep)[(first + i) * p.length + t] : T(1);
        for (int64_t c = 0; c < f.width; c += LANES<T>)
            put<T>(carried + c, vector_at<T>(carried + c) * times);
    }
}

template <class T, int R>
void backprop_group(const Cell &p, int64_t first, int64_t count, const Maps<T> &maps, Sums<T> &sums) {
    const int64_t d = p.channels, chunks = (p.length + p.every - 1) / p.every;
    Backward<T> f(p, count);
    std::vector<double> d_bc(p.groups), max_grad_norm(count);
    for (int64_t i = 0; i < count; ++i) {
        for (int64_t t = 0; t < p.length; ++t) {
            Vec<T> squares{};
            for_each_block<T>(d, [&](int64_t c, int64_t lanes) {
                const int64_t index = (first + i) * p.length + t;
                const Vec<T> v = load<T>(in<T>(p.grad_y) + index * d + c, lanes);
                squares += v * v;
            });
            const double size = std::sqrt(double(sum_lanes<T>(squares)));
            if (!(size <= max_grad_norm[i])) max_grad_norm[i] = size;
        }
    }
    for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
        const int64_t start = chunk * p.every, steps = std::min(p.every, p.length - start);
        const auto state_of = [&](int64_t i, int64_t t) {
            return f.H ? f.H + (i * p.every + t) * f.state : nullptr;
        };
        for (int64_t i = 0; i < count; ++i)
            recompute_chunk<T, R>(p, first + i, start, steps, &f.tokens[i * p.every], state_of(i, 0), f);
        for (int64_t t = steps - 1; t >= 0; --t) {
            for (int64_t i = 0; i < count; ++i) {
                const Token<T> &k = f.tokens[i * p.every + t];
                backprop_token<T, R>(p, first + i, start + t, i, k, state_of(i, t), f, sums, d_bc);
            }
            // The first token reads centroids, too.
            if (start + t > 0 || p.centroids) carry_back<T>(p, first, count, start + t, maps, f);
        }
    }
    for (int64_t i = 0; i < count && p.adjoint; ++i)
        out<T>(p.adjoint)[first + i] = T(max_grad_norm[i] == 0 ? 0 : f.largest[i] / max_grad_norm[i]);
}

// Add the gradients of all sequences, in their order.
template <class T> void sum_sequences(void *to, const std::vector<T> &from, int64_t rows, int64_t size) {
    if (!to) return;
    T *sum = out<T>(to);
    std::fill(sum, sum + size, T(0));
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = 0; i < size; ++i) sum[i] += from[row * size + i];
}

// Copy `wide` channels, from channel c on, of the vector that a token reads of y_{t−1}; zeros if it
// reads nothing. index: the token's place among all tokens.
template <class T> void read_previous_y(const Cell &p, int64_t index, int64_t c, int64_t wide, T *to) {
    const int64_t d = p.channels, tile_size = std::min(wide, d - c), t = index % p.length;
    const T *before = t ? in<T>(p.y) + (index - 1) * d : p.y0 ? in<T>(p.y0) + index / p.length * d : nullptr;
    if (p.reads) before = in<T>(p.reads) + index * d;
    const T keep_t = p.keep && !p.reads ? in<T>(p.keep)[index] : T(1);
    for (int64_t i = 0; i < wide; ++i) to[i] = before && i < tile_size ? before[c + i] * keep_t : T(0);
}

// Compute the gradient of W_y, Σ_t d_rowᵀ y_{t−1}, panel by panel of columns. The y_{t−1} of TOKENS
// tokens stay in the cache while all rows are computed.
template <class T> void compute_weight_gradient(const Cell &p) {
    constexpr int64_t TOKENS = 128, wide = WIDE * LANES<T>;
    const int64_t d = p.channels, tokens = p.rows * p.length, panels = (d + wide - 1) / wide;
#pragma omp parallel for schedule(dynamic) num_threads(p.threads) if (tokens * p.y_columns * d > (1 << 22))
    for (int64_t panel = 0; panel < panels; ++panel) {
        Arena<T> arena(TOKENS * wide + p.y_columns * wide);
        T *before = arena.take(TOKENS * wide), *sums = arena.take(p.y_columns * wide);
        std::fill(sums, sums + p.y_columns * wide, T(0));
        for (int64_t first = 0; first < tokens; first += TOKENS) {
            const int64_t tile_size = std::min(TOKENS, tokens - first);
            for (int64_t t = 0; t < tile_size; ++t)
                read_previous_y<T>(p, first + t, panel * wide, wide, before + t * wide);
            for (int64_t j = 0; j < p.y_columns; j += TALL) {
                const T *rows = in<T>(p.d_raw) + first * p.columns + j;
                const int64_t tall = std::min<int64_t>(TALL, p.y_columns - j);
                outer_tile<T>(rows, p.columns, before, tile_size, tall, sums + j * wide);
            }
        }
        const int64_t tile_size = std::min(wide, d - panel * wide);
        for (int64_t j = 0; j < p.y_columns; ++j)
            std::memcpy(out<T>(p.d_weight) + j * d + panel * wide, sums + j * wide, tile_size * sizeof(T));
    }
}

template <class T> void backward(const Cell &p) {
    const Maps<T> maps(p);
    Sums<T> sums(p);
    with_rank(p, [&](auto R) {
        for_each_group(p, GROUP_SIZE, [&](int64_t first, int64_t count) {
            backprop_group<T, decltype(R)::value>(p, first, count, maps, sums);
        });
    });
    if (p.d_weight) compute_weight_gradient<T>(p);
    if (p.kind != RNN) sum_sequences<T>(p.dA, sums.dA, p.rows, sums.A);
    sum_sequences<T>(p.dD, sums.dD, p.rows, p.channels);
    sum_sequences<T>(p.d_norm_weight, sums.d_weight, p.rows, p.channels);
    sum_sequences<T>(p.d_norm_bias, sums.d_bias, p.rows, p.channels);
}

}  // namespace

extern "C" void cell_backward_float(const Cell *p) { backward<float>(*p); }
extern "C" void cell_backward_double(const Cell *p) { backward<double>(*p); }
