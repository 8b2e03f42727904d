// Sums of squares of gradients, Adafactor, AdamW, and rounding of updated parameters. Parameters are matrices (rows, width); a vector is
// one row.
//
// One launch works on many tensors: each has an entry of a table, and a block finds its own. How a tensor is cut into blocks, and so
// the order of its sums, depends on its size alone, and not on the others.
#include "random.h"

// The rounding of an updated bf16: to nearest if `key` is not used, otherwise up or down by noise that is a hash of key, row and column.
struct Rounding {
    uint64_t key;
    uint32_t is_stochastic;
    uint32_t first_row; // of these rows in the whole parameter
};

DEVICE uint64_t noise_key(const Rounding& rounding, uint64_t row) { return mix(rounding.key ^ mix(rounding.first_row + row)); }

// The entry of a table of `count` entries that a block belongs to: the last entry whose first block, `first`, is at most `block`. The first
// entry's is 0.
template <class T>
DEVICE const T& entry_of(const T* table, int count, int T::*first, int block) {
    int from = 0, end = count;
    while (end - from > 1) {
        const int middle = (from + end) / 2;
        if (table[middle].*first <= block) from = middle;
        else end = middle;
    }
    return table[from];
}

// Rows or elements at once.
template <int N>
struct Together {
    static constexpr int COUNT = N;
};

// Stores four elements, see `load_four`.
template <int N, class T>
DEVICE void store_four(T* to, size_t at, int count, const float (&x)[4]) {
    if constexpr (N == 4) {
        store<4>(to, at, x);
    } else {
        for (int j = 0; j < 4; j++)
            if (j < count) from_float(to[at + j], x[j]);
    }
}

// Stores updated elements from `column` on, in a row that has `count` more.
template <int N>
DEVICE void put(float* to, size_t at, int count, const float (&x)[4], bool, uint64_t, uint32_t) {
    store_four<N>(to, at, count, x);
}
template <int N>
DEVICE void put(bf16* to, size_t at, int count, const float (&x)[4], bool is_stochastic, uint64_t key, uint32_t column) {
    if (!is_stochastic) return store_four<N>(to, at, count, x);
    // Noise is made for a NaN, too: otherwise elements would wait for each other's branches.
    const auto rounded = [&](int j) {
        const uint32_t exact = bits_of(x[j]), noise = hash(key, column + j) >> 16;
        return (x[j] != x[j] ? exact | 0x400000u : exact + noise) >> 16;
    };
    if constexpr (N == 4) {
        FourNarrow four;
        for (int i = 0; i < 2; i++) four.x[i] = rounded(2 * i) | rounded(2 * i + 1) << 16;
        *together_at<FourNarrow>(to + at) = four;
    } else {
        for (int j = 0; j < 4; j++)
            if (j < count) to[at + j].bits = uint16_t(rounded(j));
    }
}

// Columns that one block works on.
constexpr int COLUMNS = 1024;
// Columns that a warp works on at once, four a lane.
constexpr int WARP_COLUMNS = 4 * WARP;
// Rows whose squares are added in f32 before they are added in f64.
constexpr int BLOCK_ROWS = 32;

// A gradient whose squares are added. It has (col_parts, row_parts) blocks of rows_each rows and COLUMNS columns, from block `first_tile`
// on.
struct Gradient {
    const void* values;
    float* of_rows;     // (rows, row_parts), sums on their way
    double* of_columns; // (col_parts, width)
    float* row_sums;
    float* col_sums;
    double* total;
    int rows, rows_each, width, row_parts, col_parts;
    int first_tile; // its first block in square_sums
    int first_sum;  // in finish_square_sums
    uint32_t is_bf16;
};

// The sums of COUNT numbers over a warp, with the bits of warp_sum: lane i has the sum of number i / (WARP / COUNT). For eight numbers this
// takes nine shuffles, not forty.
template <int COUNT>
DEVICE float sums_over_warp(float (&x)[COUNT]) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int half = COUNT / 2, lanes = WARP / 2; half > 0; half /= 2, lanes /= 2) {
        // For each pair of numbers a lane keeps one, and gives the other to the lane that keeps that.
        const bool keeps_upper = lane & lanes;
#pragma unroll
        for (int i = 0; i < half; i++) {
            const float given = keeps_upper ? x[i] : x[i + half];
            x[i] = (keeps_upper ? x[i + half] : x[i]) + shuffle_xor(given, lanes);
        }
    }
    for (int lanes = WARP / COUNT / 2; lanes > 0; lanes /= 2) x[0] += shuffle_xor(x[0], lanes);
    return x[0];
}

// Adds the squares of ROWS rows of a warp's columns. This lane has four columns, or `count` if that is less.
template <int N, int ROWS, class G>
DEVICE void add_squares_of_rows(const G* gradient, int width, int count, float (&of_columns)[4], float* of_rows) {
    float x[ROWS][4], of_row[ROWS];
    // A lane without columns reads those of the last lane that has some.
    const G* from = N == 4 ? gradient + min(count - 4, 0) : gradient;
    for (int k = 0; k < ROWS; k++) load_four<N>(from, size_t(k) * width, count, x[k]);
    for (int k = 0; k < ROWS; k++) {
        of_row[k] = 0;
        for (int j = 0; j < 4; j++) {
            of_columns[j] += x[k][j] * x[k][j];
            of_row[k] += x[k][j] * x[k][j];
        }
        if (count <= 0) of_row[k] = 0;
    }
    const float sum = sums_over_warp(of_row);
    const int lane = threadIdx.x % WARP;
    if (lane % (WARP / ROWS) == 0) of_rows[lane / (WARP / ROWS)] = sum;
}

// Shared memory: COLUMNS f64, and BLOCK_ROWS f32 for each WARP_COLUMNS of them.
template <int N, class G>
DEVICE void add_squares(const Gradient& of, const G* gradient) {
    // 64 bytes a lane are in flight.
    constexpr int ROWS = 16 / sizeof(G);
    SHARED(double, totals);
    float* of_rows = reinterpret_cast<float*>(totals + COLUMNS);
    const int block = blockIdx.x - of.first_tile, part = block / of.row_parts, tile = block % of.row_parts;
    const int first = part * of.rows_each, end = min(first + of.rows_each, of.rows);
    const int from = tile * COLUMNS, columns = min(COLUMNS, of.width - from), groups = (columns + WARP_COLUMNS - 1) / WARP_COLUMNS;
    for (int row = first; row < end; row += BLOCK_ROWS) {
        const int rows = min(BLOCK_ROWS, end - row);
        for (int group = threadIdx.x / WARP; group < groups; group += blockDim.x / WARP) {
            const int column = group * WARP_COLUMNS + threadIdx.x % WARP * 4;
            float of_columns[4] = {0, 0, 0, 0};
            const G* values = gradient + size_t(row) * of.width + from + column;
            float* sums = of_rows + group * BLOCK_ROWS;
            int done = 0;
#pragma unroll 1
            for (; N == 4 && done + ROWS <= rows; done += ROWS)
                add_squares_of_rows<N, ROWS>(values + size_t(done) * of.width, of.width, columns - column, of_columns, sums + done);
#pragma unroll 1
            for (; done < rows; done++)
                add_squares_of_rows<N, 1>(values + size_t(done) * of.width, of.width, columns - column, of_columns, sums + done);
            for (int j = 0; j < 4; j++) totals[column + j] = (row == first ? 0 : totals[column + j]) + of_columns[j];
        }
        BARRIER();
        for (int i = threadIdx.x; i < rows; i += blockDim.x) {
            float sum = 0;
            for (int group = 0; group < groups; group++) sum += of_rows[group * BLOCK_ROWS + i];
            of.of_rows[size_t(row + i) * of.row_parts + tile] = sum;
        }
        BARRIER();
    }
    for (int i = threadIdx.x; i < columns; i += blockDim.x) of.of_columns[size_t(part) * of.width + from + i] = totals[i];
}
template <class G>
DEVICE void add_squares_of(const Gradient& of) {
    const G* gradient = static_cast<const G*>(of.values);
    if (in_fours(of.width, gradient)) add_squares<4>(of, gradient);
    else add_squares<1>(of, gradient);
}
KERNEL_OF_BLOCKS(256, 5, square_sums, const Gradient* table, int count) {
    const Gradient of = entry_of(table, count, &Gradient::first_tile, blockIdx.x);
    if (of.is_bf16) add_squares_of<bf16>(of);
    else add_squares_of<float>(of);
}

// Adds the parts of square_sums in order, by row and by column. A thread has a sum.
KERNEL(256, finish_square_sums, const Gradient* table, int count) {
    const Gradient of = entry_of(table, count, &Gradient::first_sum, blockIdx.x);
    const int i = (blockIdx.x - of.first_sum) * blockDim.x + threadIdx.x;
    if (i < of.rows) {
        float sum = 0;
        for (int part = 0; part < of.row_parts; part++) sum += of.of_rows[size_t(i) * of.row_parts + part];
        of.row_sums[i] = sum;
    } else if (i - of.rows < of.width) {
        double sum = 0;
        // A thread has one chain of additions, but these loads do not wait for each other.
#pragma unroll 16
        for (int part = 0; part < of.col_parts; part++) sum += of.of_columns[size_t(part) * of.width + (i - of.rows)];
        of.col_sums[i - of.rows] = float(sum);
    }
}

// The totals of the sums by row; a block has a gradient. Shared memory: 32 f64.
KERNEL(256, total_square_sums, const Gradient* table) {
    SHARED(double, scratch);
    const Gradient of = table[blockIdx.x];
    double sum = 0;
#pragma unroll 8
    for (int i = threadIdx.x; i < of.rows; i += blockDim.x) sum += double(of.row_sums[i]);
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) of.total[0] = sum;
}

// A parameter, its gradient and its moments.
struct Parameter {
    void* values;
    const void* gradient;
    float* first_moment; // null: none
    Rounding rounding;
    int rows, rows_each, width;
    int first_part; // its first block where it is updated, of rows_each rows
    uint32_t is_bf16, has_bf16_gradient;
};

// Calls `work` with the elements of parameter and gradient.
template <class Work>
DEVICE void with_elements(const Parameter& of, Work work) {
    float* wide = static_cast<float*>(of.values);
    bf16* narrow = static_cast<bf16*>(of.values);
    const float* wide_gradient = static_cast<const float*>(of.gradient);
    const bf16* narrow_gradient = static_cast<const bf16*>(of.gradient);
    if (of.is_bf16 && of.has_bf16_gradient) work(narrow, narrow_gradient);
    else if (of.is_bf16) work(narrow, wide_gradient);
    else if (of.has_bf16_gradient) work(wide, narrow_gradient);
    else work(wide, wide_gradient);
}

// The constants of one update, except the scale of its gradient: that is known last, and is an argument.
struct Adafactor {
    double learning_rate, beta2, eps1, eps2, clip_threshold, weight_decay, beta1;
    uint32_t scales_parameter, has_first_moment;
};

// The update of a parameter by Adafactor.
struct Factored : Parameter {
    Adafactor h;
    float* row; // second moments by row and column; without `row` a vector's are in `col`
    float* col;
    const float* row_sums;
    const float* col_sums;
    float* row_factor; // their product with the gradient is the update before it is clipped
    float* col_factor;
    double* partial;  // (2, parts)
    int parts;        // blocks where it is updated
    int first_factor; // its first block in adafactor_factors
};

// Updates a factored second moment, and makes the factors. Block 0 has the rows, the others a column for each thread.
DEVICE void move_factored(const Factored& of, double gradient_scale, int block, double* scratch) {
    const Adafactor& h = of.h;
    const int rows = of.rows, width = of.width;
    const double beta2 = h.beta2, new2 = 1.0 - beta2, eps1 = h.eps1, square = gradient_scale * gradient_scale;
    if (block > 0) {
        const int i = (block - 1) * blockDim.x + threadIdx.x;
        if (i >= width) return;
        const float moved = float(beta2 * double(of.col[i]) + new2 * (double(of.col_sums[i]) * square / rows + eps1));
        of.col[i] = moved;
        of.col_factor[i] = 1.0f / sqrtf(moved);
        return;
    }
    float* row = of.row;
    float* factor = of.row_factor;
    const float* sums = of.row_sums;
    // One division for all rows.
    const double each = square / width;
    double sum = 0;
    int i = threadIdx.x;
    // Rows in flight.
    constexpr int ROWS = 4;
    for (; i + (ROWS - 1) * int(blockDim.x) < rows; i += ROWS * blockDim.x) {
        float x[ROWS], squares[ROWS];
        for (int k = 0; k < ROWS; k++) x[k] = row[i + k * blockDim.x], squares[k] = sums[i + k * blockDim.x];
        for (int k = 0; k < ROWS; k++) {
            x[k] = float(beta2 * double(x[k]) + new2 * (double(squares[k]) * each + eps1));
            row[i + k * blockDim.x] = x[k];
            sum += double(x[k]);
        }
    }
    for (; i < rows; i += blockDim.x) {
        const float moved = float(beta2 * double(row[i]) + new2 * (double(sums[i]) * each + eps1));
        row[i] = moved;
        sum += double(moved);
    }
    // Divides roots, and does not take the root of a quotient, which may not fit an f32: a row's moment can be far below their mean.
    const float root = sqrtf(float(block_sum(sum, scratch) / rows)), scale = float(gradient_scale);
#pragma unroll 4
    for (i = threadIdx.x; i < rows; i += blockDim.x) factor[i] = scale * (root / sqrtf(row[i]));
}

// Does the same for the full second moment of a vector: its one row has the gradient's scale as its factor. A thread has an element.
DEVICE void move_full(const Factored& of, double gradient_scale, int block) {
    const Adafactor& h = of.h;
    const int i = block * blockDim.x + threadIdx.x;
    if (i == 0) of.row_factor[0] = float(gradient_scale);
    if (i >= of.width) return;
    const float gradient = of.has_bf16_gradient ? to_float(static_cast<const bf16*>(of.gradient)[i]) : static_cast<const float*>(of.gradient)[i];
    const double g = double(gradient) * gradient_scale;
    of.col[i] = float(h.beta2 * double(of.col[i]) + (1.0 - h.beta2) * (g * g + h.eps1));
    of.col_factor[i] = 1.0f / sqrtf(of.col[i]);
}

// Shared memory: 32 f64.
KERNEL_OF_BLOCKS(256, 5, adafactor_factors, const Factored* table, int count, double gradient_scale) {
    SHARED(double, scratch);
    const Factored of = entry_of(table, count, &Factored::first_factor, blockIdx.x);
    const int block = blockIdx.x - of.first_factor;
    if (of.row) move_factored(of, gradient_scale, block, scratch);
    else move_full(of, gradient_scale, block);
}

// Rows that a block works on between two barriers. Each of these rows has a key in shared memory, and squares are added in f32 over these
// rows. A power of two.
constexpr int MET_ROWS = 128;

// Calls work(together, row, column, step) for all elements of rows `from` to `end`: the four columns from `column` on of rows `row`, `row`
// + `step`, .., ROWS of them at a time as far as possible, so that all are loaded before the first is used.
template <int N, int ROWS, class Work>
DEVICE void each_four(int width, int from, int end, Work work) {
    const int fours = (width + 3) / 4, across = min(fours, int(blockDim.x)), step = blockDim.x / across;
    const int first = from + threadIdx.x / across;
    if (first >= from + step) return;
    for (int four = threadIdx.x % across; four < fours; four += across) {
        int row = first;
        // Unaligned rows are too rare for code of their own.
#pragma unroll 1
        for (; N == 4 && row + (ROWS - 1) * step < end; row += ROWS * step) work(Together<ROWS>{}, row, 4 * four, step);
#pragma unroll 1
        for (; row < end; row += step) work(Together<1>{}, row, 4 * four, step);
    }
}

// Does the same for a parameter's rows that belong to this block, MET_ROWS at a time, after before(from, end) of these rows.
template <int N, int ROWS, class Before, class Work>
DEVICE void each_of_block(const Parameter& of, Before before, Work work) {
    const int first = (blockIdx.x - of.first_part) * of.rows_each, last = min(first + of.rows_each, of.rows), width = of.width;
    for (int from = first; from < last; from += MET_ROWS) {
        const int end = min(from + MET_ROWS, last);
        before(from, end);
        each_four<N, ROWS>(width, from, end, work);
    }
}

// Four elements of some rows, see `each_four`: of the parameter, and of the update before clipping.
template <int N, int ROWS, class P, class G>
DEVICE void load_updates(const P* parameter, const G* gradient, const float* row_factor, const float* col_factor, int width, int row, int column,
                         int step, float (&p)[ROWS][4], float (&update)[ROWS][4]) {
    const int count = width - column;
    float factor[ROWS], of_column[4];
    for (int k = 0; k < ROWS; k++) {
        const size_t at = size_t(row + k * step) * width + column;
        load_four<N>(gradient, at, count, update[k]);
        load_four<N>(parameter, at, count, p[k]);
        factor[k] = row_factor[row + k * step];
    }
    load_four<N>(col_factor, column, count, of_column);
    for (int k = 0; k < ROWS; k++)
        for (int j = 0; j < 4; j++) update[k][j] = update[k][j] * factor[k] * of_column[j];
}

// Adds the squares of the update and of the parameter.
template <int N, class P, class G>
DEVICE void add_squares(const Factored& of, const P* parameter, const G* gradient, double& updates, double& parameters) {
    const int width = of.width;
    float of_updates = 0, of_parameters = 0;
    const auto before = [&](int, int) {
        updates += of_updates, parameters += of_parameters;
        of_updates = of_parameters = 0;
    };
    each_of_block<N, 16 / (sizeof(P) + sizeof(G))>(of, before, [&](auto together, int row, int column, int step) {
        constexpr int ROWS = decltype(together)::COUNT;
        float update[ROWS][4], p[ROWS][4];
        load_updates<N>(parameter, gradient, of.row_factor, of.col_factor, width, row, column, step, p, update);
        for (int k = 0; k < ROWS; k++)
            for (int j = 0; j < 4; j++) {
                if (N == 4 || j < width - column) of_updates += update[k][j] * update[k][j];
                of_parameters += p[k][j] * p[k][j];
            }
    });
    before(0, 0);
}
// A block has rows_each rows. Shared memory: 32 f64.
KERNEL_OF_BLOCKS(256, 5, adafactor_squares, const Factored* table, int count) {
    SHARED(double, scratch);
    const Factored of = entry_of<Factored>(table, count, &Factored::first_part, blockIdx.x);
    double updates = 0, parameters = 0;
    with_elements(of, [&](auto* parameter, auto* gradient) {
        if (in_fours(of.width, parameter, gradient, of.col_factor)) add_squares<4>(of, parameter, gradient, updates, parameters);
        else add_squares<1>(of, parameter, gradient, updates, parameters);
    });
    updates = block_sum(updates, scratch);
    parameters = block_sum(parameters, scratch);
    if (threadIdx.x == 0) {
        const int part = blockIdx.x - of.first_part;
        of.partial[part] = updates;
        of.partial[of.parts + part] = parameters;
    }
}

// The factors of an update after clipping.
struct Clipped {
    float step, keep, beta1;
};

// Computed from the sums of squares above, by one warp: consumer cards have few units for f64.
DEVICE Clipped clipped(const Factored& of, Clipped* shared) {
    if (threadIdx.x < WARP) {
        const Adafactor& h = of.h;
        const double* partial = of.partial;
        const int parts = of.parts;
        double updates = 0, parameters = 0;
#pragma unroll 8
        for (int i = threadIdx.x; i < parts; i += WARP) updates += partial[i], parameters += partial[parts + i];
        updates = warp_sum(updates);
        parameters = warp_sum(parameters);
        const double count = double(of.rows) * double(of.width);
        const double rms = sqrt(parameters / count);
        const double lr = h.scales_parameter ? h.learning_rate * (rms > h.eps2 ? rms : h.eps2) : h.learning_rate;
        const double excess = sqrt(updates / count) / h.clip_threshold;
        if (threadIdx.x == 0)
            *shared = {float(lr / (excess > 1.0 || excess != excess ? excess : 1.0)), float(1.0 - h.weight_decay * lr), float(h.beta1)};
    }
    BARRIER();
    return *shared;
}

// Makes the keys of rows `from` to `end`: a key takes as long as the noise of four elements.
DEVICE void make_keys(const Rounding& rounding, int from, int end, uint64_t* keys) {
    if (!rounding.is_stochastic) return;
    BARRIER();
#pragma unroll 1
    for (int row = from + threadIdx.x; row < end; row += blockDim.x) keys[row & (MET_ROWS - 1)] = noise_key(rounding, row);
    BARRIER();
}

// p = p * keep - update.
template <int N, class P, class G>
DEVICE void apply(const Parameter& of, const Clipped& by, const float* row_factor, const float* col_factor, P* parameter, const G* gradient,
                  uint64_t* keys) {
    float* first_moment = of.first_moment;
    const int width = of.width;
    const bool is_stochastic = of.rounding.is_stochastic;
    const auto before = [&](int from, int end) { make_keys(of.rounding, from, end, keys); };
    each_of_block<N, 16 / (sizeof(P) + sizeof(G))>(of, before, [&](auto together, int row, int column, int step) {
        constexpr int ROWS = decltype(together)::COUNT;
        const size_t at = size_t(row) * width + column, next = size_t(step) * width;
        const int count = width - column;
        float update[ROWS][4], p[ROWS][4];
        load_updates<N>(parameter, gradient, row_factor, col_factor, width, row, column, step, p, update);
        for (int k = 0; k < ROWS; k++) {
            for (int j = 0; j < 4; j++) update[k][j] *= by.step;
            if (first_moment) {
                float m[4];
                load_four<N>(first_moment, at + k * next, count, m);
                for (int j = 0; j < 4; j++) update[k][j] = m[j] * by.beta1 + update[k][j] * (1.0f - by.beta1);
                store_four<N>(first_moment, at + k * next, count, update[k]);
            }
            for (int j = 0; j < 4; j++) p[k][j] = p[k][j] * by.keep - update[k][j];
            const uint64_t key = is_stochastic ? keys[(row + k * step) & (MET_ROWS - 1)] : 0;
            put<N>(parameter, at + k * next, count, p[k], is_stochastic, key, column);
        }
    });
}
// A block has rows_each rows. Shared memory: MET_ROWS keys.
KERNEL_OF_BLOCKS(256, 3, adafactor_apply, const Factored* table, int count) {
    SHARED(uint64_t, keys);
    const Factored& of = entry_of<Factored>(table, count, &Factored::first_part, blockIdx.x);
    const Clipped by = clipped(of, reinterpret_cast<Clipped*>(keys));
    const float *row_factor = of.row_factor, *col_factor = of.col_factor;
    with_elements(of, [&](auto* parameter, auto* gradient) {
        if (in_fours(of.width, parameter, gradient, of.first_moment, col_factor)) apply<4>(of, by, row_factor, col_factor, parameter, gradient, keys);
        else apply<1>(of, by, row_factor, col_factor, parameter, gradient, keys);
    });
}

// The constants of one update by AdamW.
struct Adamw {
    float beta1, beta2;
    float new1, new2; // 1 - beta
    float rate;       // the learning rate over the first moment's correction
    float root;       // the root of the second moment's correction
    float eps;
    float keep; // the factor of weight decay
};

// The update of a parameter by AdamW.
struct Decayed : Parameter {
    Adamw h;
    float* second_moment;
};

template <int N, class P, class G>
DEVICE void apply_adamw(const Decayed& of, float scale, P* parameter, const G* gradient, uint64_t* keys) {
    const Adamw h = of.h;
    float *first_moment = of.first_moment, *second_moment = of.second_moment;
    const int width = of.width;
    const bool is_stochastic = of.rounding.is_stochastic;
    const auto before = [&](int from, int end) { make_keys(of.rounding, from, end, keys); };
    each_of_block<N, 1>(of, before, [&](auto together, int row, int column, int step) {
        constexpr int ROWS = decltype(together)::COUNT;
        const size_t at = size_t(row) * width + column, next = size_t(step) * width;
        const int count = width - column;
        float g[ROWS][4], p[ROWS][4], m[ROWS][4], v[ROWS][4];
        for (int k = 0; k < ROWS; k++) {
            load_four<N>(gradient, at + k * next, count, g[k]);
            load_four<N>(parameter, at + k * next, count, p[k]);
            load_four<N>(first_moment, at + k * next, count, m[k]);
            load_four<N>(second_moment, at + k * next, count, v[k]);
        }
        for (int k = 0; k < ROWS; k++) {
            for (int j = 0; j < 4; j++) {
                const float x = g[k][j] * scale;
                m[k][j] = m[k][j] * h.beta1 + x * h.new1;
                v[k][j] = v[k][j] * h.beta2 + x * x * h.new2;
                p[k][j] = p[k][j] * h.keep - h.rate * m[k][j] / (sqrtf(v[k][j]) / h.root + h.eps);
            }
            store_four<N>(first_moment, at + k * next, count, m[k]);
            store_four<N>(second_moment, at + k * next, count, v[k]);
            const uint64_t key = is_stochastic ? keys[(row + k * step) & (MET_ROWS - 1)] : 0;
            put<N>(parameter, at + k * next, count, p[k], is_stochastic, key, column);
        }
    });
}
// A block has rows_each rows. Shared memory: MET_ROWS keys.
KERNEL_OF_BLOCKS(256, 3, adamw, const Decayed* table, int count, double gradient_scale) {
    SHARED(uint64_t, keys);
    const Decayed& of = entry_of<Decayed>(table, count, &Decayed::first_part, blockIdx.x);
    const float scale = float(gradient_scale);
    with_elements(of, [&](auto* parameter, auto* gradient) {
        if (in_fours(of.width, parameter, gradient, of.first_moment, of.second_moment)) apply_adamw<4>(of, scale, parameter, gradient, keys);
        else apply_adamw<1>(of, scale, parameter, gradient, keys);
    });
}

// Calls work(together, i) for the elements of `count`, from `i` on, that thread `thread` of `threads` has: four at a time if all are
// aligned.
template <class Work>
DEVICE void each_element(size_t thread, size_t threads, size_t count, bool are_aligned, Work work) {
    const size_t in_fours = are_aligned ? count / 4 * 4 : 0;
    for (size_t i = thread * 4; i < in_fours; i += threads * 4) work(Together<4>{}, i);
    for (size_t i = in_fours + thread; i < count; i += threads) work(Together<1>{}, i);
}

// A weight and its copy in bf16, in blocks of a fixed number of elements from `first_block` on.
struct Narrowed {
    const float* from;
    bf16* to;
    uint64_t elements;
    int first_block;
    uint32_t unused;
};
constexpr int NARROWED = 16 << 10;
KERNEL(256, narrow_each, const Narrowed* table, int count) {
    const Narrowed of = entry_of(table, count, &Narrowed::first_block, blockIdx.x);
    const uint64_t first = uint64_t(blockIdx.x - of.first_block) * NARROWED, left = of.elements - first;
    const float* from = of.from + first;
    bf16* to = of.to + first;
    each_element(threadIdx.x, blockDim.x, left < NARROWED ? left : NARROWED, in_fours(4, from, to), [&](auto together, size_t i) {
        float x[decltype(together)::COUNT];
        load(from, i, x);
        store(to, i, x);
    });
}

// Does the same for one tensor, by the whole grid.
template <class Work>
DEVICE void each_of_grid(size_t count, bool are_aligned, Work work) {
    each_element(size_t(blockIdx.x) * blockDim.x + threadIdx.x, size_t(gridDim.x) * blockDim.x, count, are_aligned, work);
}

// sum += x, element by element; bf16 are added in f32.
template <class T>
DEVICE void add(T* sum, const T* x, size_t count) {
    each_of_grid(count, in_fours(4, sum, x), [&](auto together, size_t i) {
        constexpr int N = decltype(together)::COUNT;
        float a[N], b[N];
        load(sum, i, a);
        load(x, i, b);
        for (int j = 0; j < N; j++) a[j] += b[j];
        store(sum, i, a);
    });
}
KERNEL(256, add_f32, float* sum, const float* x, size_t count) { add(sum, x, count); }
KERNEL(256, add_bf16, bf16* sum, const bf16* x, size_t count) { add(sum, x, count); }

// y = x * factor, rounded once. Every zero is positive, as in candle's product and sum.
template <class T>
DEVICE void scaled(const T* x, T* y, float factor, size_t count) {
    each_of_grid(count, in_fours(4, x, y), [&](auto together, size_t i) {
        constexpr int N = decltype(together)::COUNT;
        float a[N];
        load(x, i, a);
        for (int j = 0; j < N; j++) a[j] = a[j] * factor + 0.0f;
        store(y, i, a);
    });
}
KERNEL(256, scaled_f32, const float* x, float* y, float factor, size_t count) { scaled(x, y, factor, count); }
KERNEL(256, scaled_bf16, const bf16* x, bf16* y, float factor, size_t count) { scaled(x, y, factor, count); }
