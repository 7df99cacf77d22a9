// Backward pass of the `cell` kernel: backpropagation through time, from the last token to the first,
// with the implicit function theorem in each token (cell_gradient.h). States are recomputed from
// checkpoints, chunk by chunk. lm/kernels/cell_arguments.py lists the differentiable arguments.

#include "cell_gradient.h"

namespace {

// Backpropagate through one token of the i-th sequence of the group.
template <class T, int R>
void backprop_token(const Cell &cell, int64_t sequence, int64_t t, int64_t i, const Token<T> &token, const T *H,
                BackwardWork<T> &work, Sums<T> &sums, std::vector<double> &d_bc) {
    const int64_t d = cell.channels, token_index = sequence * cell.length + t;
    T *mu = work.mu + i * work.state_size, *d_row = output<T>(cell.d_raw) + token_index * cell.columns;
    const T *row = find_row<T>(cell, token_index);
    std::fill(d_row, d_row + cell.columns, T(0));
    TokenGradient grads;
    T mean, inverse;
    gather_lambda<T>(cell, token_index, i, work);
    if (cell.kind == RNN)
        std::fill(work.mu_B, work.mu_B + d, T(0));
    else
        backprop_inflow<T>(cell, token, mu, work);
    compute_v<T>(cell, token_index, token, work.v, mean, inverse);
    compute_sums<T, R>(cell, token_index, token, mean, inverse, work, grads);
    solve_adjoint<R>(cell.rank, cell.outcome[token_index] & FAILED, grads);
    backprop_y<T, R>(cell, token_index, sequence, token, inverse, work, grads, sums, d_bc.data());
    backprop_map<R>(cell.rank, cell.sequential, cell.kappa, cell.scale, token, token.distance, grads);
    backprop_vectors<T, R>(cell, token_index, row, token, grads, work);
    for (int64_t j = 0; j < cell.rank; ++j) d_row[cell.gates + j] = T(grads.d_gate[j]);
    const T keep_t = cell.keep ? input<T>(cell.keep)[token_index] : T(1);
    if (cell.kind == RNN) {
        const T *h = find_previous_y<T>(cell, token_index, cell.h0);
        if (!h) h = work.zeros;
        for (int64_t c = 0; c < d; ++c) {
            output<T>(cell.dA)[token_index * d + c] = work.d_past[c] * h[c] * keep_t;
            mu[c] = work.d_past[c] * token.decay[c];
            output<T>(cell.ddt)[token_index * d + c] = work.ddt[c];
        }
        return;
    }
    backprop_state<T>(cell, token, keep_t, H, mu, work, &sums.dA[sequence * sums.A_size]);
    backprop_units<T>(cell, work.dB, token.B, token.C, d_bc.data(), token.B_length, d_row + cell.B_column);
    backprop_units<T>(cell, work.dC, token.C, token.B, d_bc.data(), token.C_length, d_row + cell.C_column);
    if (cell.kind == MAMBA1)
        return void(std::memcpy(output<T>(cell.ddt) + token_index * d, work.ddt, d * sizeof(T)));
    for (int64_t h = 0, head_width = d / cell.heads; h < cell.heads; ++h) {
        T sum = 0;
        for (int64_t c = h * head_width; c < (h + 1) * head_width; ++c) sum += work.ddt[c];
        output<T>(cell.ddt)[token_index * cell.heads + h] = sum;
    }
}

// Backpropagate `d_y_before`, the gradient of the vector that token t reads, through the centroids to
// y_{t−1}.
template <class T>
void backprop_centroids(const Cell &cell, int64_t first, int64_t count, int64_t t, const PaddedWeights<T> &weights,
                       BackwardWork<T> &work) {
    const int64_t centroids = cell.centroids, d = cell.channels, tokens = first * cell.length + t;
    const int64_t step = cell.length * centroids;
    T *d_logits = output<T>(cell.d_logits) + tokens * centroids;
    for (int64_t i = 0; i < count; ++i) {
        std::memcpy(output<T>(cell.d_reads) + (tokens + i * cell.length) * d, work.d_y_before + i * work.width,
                    d * sizeof(T));
        std::fill(d_logits + i * step, d_logits + i * step + centroids, T(0));
    }
    for_each_tile(count, [&](int64_t i, auto S) {
        const T *d_y_before = work.d_y_before + i * work.width;
        T *to = d_logits + i * step;
        project_tile<T, decltype(S)::value>(weights.values, centroids, work.width, d_y_before, to, step);
    });
    for (int64_t i = 0; i < count; ++i) {
        const T *alpha = input<T>(cell.alphas) + tokens * centroids + i * step;
        T *d_logit = d_logits + i * step;
        Vec<T> sums{};
        for_each_block<T>(centroids, [&](int64_t j, int64_t lanes) {
            sums += load<T>(alpha + j, lanes) * load<T>(d_logit + j, lanes);
        });
        const T mean = sum_lanes<T>(sums);
        for (int64_t j = 0; j < centroids; ++j) d_logit[j] = alpha[j] * (d_logit[j] - mean);
    }
    for_each_tile(count, [&](int64_t i, auto S) {
        T *d_y_before = work.d_y_before + i * work.width;
        const T *from = d_logits + i * step;
        combine_weight_rows<T, decltype(S)::value>(weights.keys, centroids, work.width, from, step, d_y_before);
    });
    for (int64_t i = 0; i < count && cell.d_noise; ++i)
        std::memcpy(output<T>(cell.d_noise) + (tokens + i * cell.length) * d, work.d_y_before + i * work.width,
                    d * sizeof(T));
}

// Compute `d_y_before` of token t − 1 from the gradients of the rows of token t.
template <class T>
void backprop_rows(const Cell &cell, int64_t first, int64_t count, int64_t t, const PaddedWeights<T> &weights,
           BackwardWork<T> &work) {
    const int64_t step = cell.length * cell.columns;
    const T *d_rows = input<T>(cell.d_raw) + (first * cell.length + t) * cell.columns;
    for_each_tile(count, [&](int64_t i, auto S) {
        combine_weight_rows<T, decltype(S)::value>(weights.W_y, cell.y_columns, work.width, d_rows + i * step, step,
                                           work.d_y_before + i * work.width);
    });
    if (cell.centroids) backprop_centroids<T>(cell, first, count, t, weights, work);
    for (int64_t i = 0; i < count; ++i) {
        T *d_y_before = work.d_y_before + i * work.width;
        const T factor = cell.keep ? input<T>(cell.keep)[(first + i) * cell.length + t] : T(1);
        for (int64_t c = 0; c < work.width; c += LANES<T>)
            put<T>(d_y_before + c, vector_at<T>(d_y_before + c) * factor);
    }
}

template <class T, int R>
void backprop_group(const Cell &cell, int64_t first, int64_t count, const PaddedWeights<T> &weights,
                    Sums<T> &sums) {
    const int64_t d = cell.channels, interval = cell.checkpoint_interval;
    BackwardWork<T> work(cell, count);
    std::vector<double> d_bc(cell.groups), max_grad_norm(count);
    for (int64_t i = 0; i < count; ++i) {
        for (int64_t t = 0; t < cell.length; ++t) {
            Vec<T> squares{};
            for_each_block<T>(d, [&](int64_t c, int64_t lanes) {
                const int64_t token_index = (first + i) * cell.length + t;
                const Vec<T> grad = load<T>(input<T>(cell.grad_y) + token_index * d + c, lanes);
                squares += grad * grad;
            });
            const double grad_norm = std::sqrt(double(sum_lanes<T>(squares)));
            if (!(grad_norm <= max_grad_norm[i])) max_grad_norm[i] = grad_norm;
        }
    }
    for (int64_t chunk = count_chunks(cell) - 1; chunk >= 0; --chunk) {
        const int64_t start = chunk * interval, steps = std::min(interval, cell.length - start);
        const auto find_state = [&](int64_t i, int64_t t) {
            return work.H ? work.H + (i * interval + t) * work.state_size : nullptr;
        };
        for (int64_t i = 0; i < count; ++i)
            recompute_chunk<T, R>(cell, first + i, start, steps, &work.tokens[i * interval], find_state(i, 0),
                                  work);
        for (int64_t t = steps - 1; t >= 0; --t) {
            for (int64_t i = 0; i < count; ++i) {
                const Token<T> &token = work.tokens[i * interval + t];
                backprop_token<T, R>(cell, first + i, start + t, i, token, find_state(i, t), work, sums, d_bc);
            }
            // y0 has no gradient, but the centroids that a first token reads have.
            if (start + t > 0 || cell.centroids) backprop_rows<T>(cell, first, count, start + t, weights, work);
        }
    }
    for (int64_t i = 0; i < count && cell.adjoint; ++i)
        output<T>(cell.adjoint)[first + i] = T(max_grad_norm[i] == 0 ? 0 : work.max_lambda_norm[i] / max_grad_norm[i]);
}

// Add the gradients of all sequences, in their order.
template <class T> void sum_sequences(void *to, const std::vector<T> &from, int64_t batch, int64_t size) {
    if (!to) return;
    T *sum = output<T>(to);
    std::fill(sum, sum + size, T(0));
    for (int64_t sequence = 0; sequence < batch; ++sequence)
        for (int64_t i = 0; i < size; ++i) sum[i] += from[sequence * size + i];
}

// Copy `panel_width` channels, from channel c on, of the vector that W_y multiplies for a token: y_{t−1} or
// Σ_i α_i c_i. Channels beyond d and the vector of a first token without y0 are zero.
template <class T> void read_previous_y(const Cell &cell, int64_t token_index, int64_t c, int64_t panel_width,
                                        T *to) {
    const int64_t d = cell.channels, width = std::min(panel_width, d - c);
    const T *before = find_previous_y<T>(cell, token_index, cell.y0);
    if (cell.reads) before = input<T>(cell.reads) + token_index * d;
    const T keep_t = cell.keep && !cell.reads ? input<T>(cell.keep)[token_index] : T(1);
    for (int64_t i = 0; i < panel_width; ++i) to[i] = before && i < width ? before[c + i] * keep_t : T(0);
}

// Compute the gradient of W_y, Σ_t d_rowᵀ y_{t−1}, panel by panel of columns. The y_{t−1} of TOKENS
// tokens stay in the cache while all rows are computed.
template <class T> void compute_weight_gradient(const Cell &cell) {
    constexpr int64_t TOKENS = 128, panel_width = TILE_VECTORS * LANES<T>;
    const int64_t d = cell.channels, tokens = cell.batch * cell.length;
    const int64_t panels = (d + panel_width - 1) / panel_width;
#pragma omp parallel for schedule(dynamic) num_threads(cell.threads) if (tokens * cell.y_columns * d > (1 << 22))
    for (int64_t panel = 0; panel < panels; ++panel) {
        Arena<T> arena(TOKENS * panel_width + cell.y_columns * panel_width);
        T *before = arena.take(TOKENS * panel_width), *sums = arena.take(cell.y_columns * panel_width);
        std::fill(sums, sums + cell.y_columns * panel_width, T(0));
        for (int64_t first = 0; first < tokens; first += TOKENS) {
            const int64_t count = std::min(TOKENS, tokens - first);
            for (int64_t t = 0; t < count; ++t)
                read_previous_y<T>(cell, first + t, panel * panel_width, panel_width, before + t * panel_width);
            for (int64_t j = 0; j < cell.y_columns; j += TILE_ROWS) {
                const T *d_rows = input<T>(cell.d_raw) + first * cell.columns + j;
                const int64_t row_count = std::min<int64_t>(TILE_ROWS, cell.y_columns - j);
                outer_tile<T>(d_rows, cell.columns, before, count, row_count, sums + j * panel_width);
            }
        }
        const int64_t width = std::min(panel_width, d - panel * panel_width);
        for (int64_t j = 0; j < cell.y_columns; ++j)
            std::memcpy(output<T>(cell.d_weight) + j * d + panel * panel_width, sums + j * panel_width,
                        width * sizeof(T));
    }
}

template <class T> void backward(const Cell &cell) {
    const PaddedWeights<T> weights(cell);
    Sums<T> sums(cell);
    with_rank(cell, [&](auto R) {
        for_each_sequence_group(cell, GROUP_SIZE, [&](int64_t first, int64_t count) {
            backprop_group<T, decltype(R)::value>(cell, first, count, weights, sums);
        });
    });
    if (cell.d_weight) compute_weight_gradient<T>(cell);
    if (cell.kind != RNN) sum_sequences<T>(cell.dA, sums.dA, cell.batch, sums.A_size);
    sum_sequences<T>(cell.dD, sums.dD, cell.batch, cell.channels);
    sum_sequences<T>(cell.d_norm_weight, sums.d_weight, cell.batch, cell.channels);
    sum_sequences<T>(cell.d_norm_bias, sums.d_bias, cell.batch, cell.channels);
}

}  // namespace

extern "C" void cell_backward_float(const Cell *cell) { backward<float>(*cell); }
extern "C" void cell_backward_double(const Cell *cell) { backward<double>(*cell); }
