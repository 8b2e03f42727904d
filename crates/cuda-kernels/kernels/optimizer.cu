// Sums of squares of gradients, Adafactor, AdamW, and rounding of what they update. Parameters are matrices (rows, width); a vector is one row.
//
// One launch works on many tensors: each has an entry of a table, and a block finds its own. How a tensor is cut into blocks, and so
// the order of its sums, depends on its size alone, and not on the others.
#include "random.h"

// How an updated bf16 is rounded: to nearest where `key` is not used, otherwise up or down by noise that is a hash of key, row and column.
struct Rounding {
    uint64_t key;
    uint32_t is_stochastic;
    uint32_t first_row; // of these rows in the whole parameter
};

DEVICE uint64_t noise_key(const Rounding& rounding, uint64_t row) { return mix(rounding.key ^ mix(rounding.first_row + row)); }

DEVICE void put(float& to, float x, const Rounding&, uint64_t, uint32_t) { to = x; }
DEVICE void put(bf16& to, float x, const Rounding& rounding, uint64_t key, uint32_t column) {
    if (!rounding.is_stochastic || x != x) return from_float(to, x);
    to.bits = uint16_t((bits_of(x) + (hash(key, column) >> 16)) >> 16);
}

// The entry of a table of `count` to which a block belongs: the last whose first block, `first`, is not behind it. The first entry's is 0.
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

// Columns that one block works on.
constexpr int COLUMNS = 1024;
// Rows whose squares are added in f32 before they are added in f64.
constexpr int BLOCK_ROWS = 32;

// A gradient whose squares are added. It has (col_parts, row_parts) blocks of rows_each rows and COLUMNS columns from `first_tile` on.
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

// Shared memory: 2 * COLUMNS + 32 f64.
template <class G>
DEVICE void add_squares(const Gradient& of, const G* gradient) {
    SHARED(double, totals);
    float* sums = reinterpret_cast<float*>(totals + COLUMNS);
    float* scratch = sums + COLUMNS;
    const int block = blockIdx.x - of.first_tile, part = block / of.row_parts, tile = block % of.row_parts;
    const int first = part * of.rows_each, end = min(first + of.rows_each, of.rows);
    const int from = tile * COLUMNS, columns = min(COLUMNS, of.width - from);
    // Each thread has columns of its own.
    for (int i = threadIdx.x; i < columns; i += blockDim.x) totals[i] = 0, sums[i] = 0;
    for (int row = first; row < end; row++) {
        float of_row = 0;
        for (int i = threadIdx.x; i < columns; i += blockDim.x) {
            const float x = to_float(gradient[size_t(row) * of.width + from + i]);
            sums[i] += x * x;
            of_row += x * x;
        }
        of_row = block_sum(of_row, scratch);
        if (threadIdx.x == 0) of.of_rows[size_t(row) * of.row_parts + tile] = of_row;
        if ((row - first) % BLOCK_ROWS != BLOCK_ROWS - 1 && row != end - 1) continue;
        for (int i = threadIdx.x; i < columns; i += blockDim.x) totals[i] += sums[i], sums[i] = 0;
    }
    for (int i = threadIdx.x; i < columns; i += blockDim.x) of.of_columns[size_t(part) * of.width + from + i] = totals[i];
}
KERNEL(256, square_sums, const Gradient* table, int count) {
    const Gradient of = entry_of(table, count, &Gradient::first_tile, blockIdx.x);
    if (of.is_bf16) add_squares(of, static_cast<const bf16*>(of.values));
    else add_squares(of, static_cast<const float*>(of.values));
}

// The parts of square_sums, added in order, by row and by column. A thread a sum.
KERNEL(256, finish_square_sums, const Gradient* table, int count) {
    const Gradient of = entry_of(table, count, &Gradient::first_sum, blockIdx.x);
    const int i = (blockIdx.x - of.first_sum) * blockDim.x + threadIdx.x;
    if (i < of.rows) {
        float sum = 0;
        for (int part = 0; part < of.row_parts; part++) sum += of.of_rows[size_t(i) * of.row_parts + part];
        of.row_sums[i] = sum;
    } else if (i - of.rows < of.width) {
        double sum = 0;
        for (int part = 0; part < of.col_parts; part++) sum += of.of_columns[size_t(part) * of.width + (i - of.rows)];
        of.col_sums[i - of.rows] = float(sum);
    }
}

// The totals of the sums by row; a block a gradient. Shared memory: 32 f64.
KERNEL(256, total_square_sums, const Gradient* table) {
    SHARED(double, scratch);
    const Gradient of = table[blockIdx.x];
    double sum = 0;
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

// The numbers of one update.
struct Adafactor {
    double learning_rate, beta2, eps1, eps2, clip_threshold, weight_decay, gradient_scale, beta1;
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

// Moves a factored second moment on, and makes the factors. Block 0 has the rows, the others a thread a column.
DEVICE void move_factored(const Factored& of, int block, double* scratch) {
    const Adafactor& h = of.h;
    const int rows = of.rows, width = of.width;
    const double square = h.gradient_scale * h.gradient_scale;
    if (block > 0) {
        const int i = (block - 1) * blockDim.x + threadIdx.x;
        if (i >= width) return;
        const double moved = h.beta2 * double(of.col[i]) + (1.0 - h.beta2) * (double(of.col_sums[i]) * square / rows + h.eps1);
        of.col[i] = float(moved);
        of.col_factor[i] = float(1.0 / sqrt(double(of.col[i])));
        return;
    }
    double sum = 0;
    for (int i = threadIdx.x; i < rows; i += blockDim.x) {
        const double moved = h.beta2 * double(of.row[i]) + (1.0 - h.beta2) * (double(of.row_sums[i]) * square / width + h.eps1);
        of.row[i] = float(moved);
        sum += double(of.row[i]);
    }
    const double mean = block_sum(sum, scratch) / rows;
    for (int i = threadIdx.x; i < rows; i += blockDim.x) of.row_factor[i] = float(h.gradient_scale * sqrt(mean / double(of.row[i])));
}

// The same for the full second moment of a vector: its one row has the gradient's scale as its factor. A thread an element.
DEVICE void move_full(const Factored& of, int block) {
    const Adafactor& h = of.h;
    const int i = block * blockDim.x + threadIdx.x;
    if (i == 0) of.row_factor[0] = float(h.gradient_scale);
    if (i >= of.width) return;
    const float gradient = of.has_bf16_gradient ? to_float(static_cast<const bf16*>(of.gradient)[i]) : static_cast<const float*>(of.gradient)[i];
    const double g = double(gradient) * h.gradient_scale;
    of.col[i] = float(h.beta2 * double(of.col[i]) + (1.0 - h.beta2) * (g * g + h.eps1));
    of.col_factor[i] = 1.0f / sqrtf(of.col[i]);
}

// Shared memory: 32 f64.
KERNEL_OF_BLOCKS(256, 5, adafactor_factors, const Factored* table, int count) {
    SHARED(double, scratch);
    const Factored of = entry_of(table, count, &Factored::first_factor, blockIdx.x);
    const int block = blockIdx.x - of.first_factor;
    if (of.row) move_factored(of, block, scratch);
    else move_full(of, block);
}

// Squares of the update and of the parameter.
template <class P, class G>
DEVICE void square_update(const Factored& of, const P* parameter, const G* gradient, double* scratch) {
    const int part = blockIdx.x - of.first_part, width = of.width;
    const int first = part * of.rows_each, end = min(first + of.rows_each, of.rows);
    double updates = 0, parameters = 0;
    for (int row = first; row < end; row++) {
        float of_update = 0, of_parameter = 0;
        for (int i = threadIdx.x; i < width; i += blockDim.x) {
            const size_t at = size_t(row) * width + i;
            const float u = to_float(gradient[at]) * of.row_factor[row] * of.col_factor[i], p = to_float(parameter[at]);
            of_update += u * u;
            of_parameter += p * p;
        }
        updates += of_update;
        parameters += of_parameter;
    }
    updates = block_sum(updates, scratch);
    parameters = block_sum(parameters, scratch);
    if (threadIdx.x == 0) {
        of.partial[part] = updates;
        of.partial[of.parts + part] = parameters;
    }
}
// A block rows_each rows. Shared memory: 32 f64.
KERNEL(256, adafactor_squares, const Factored* table, int count) {
    SHARED(double, scratch);
    const Factored of = entry_of<Factored>(table, count, &Factored::first_part, blockIdx.x);
    with_elements(of, [&](auto* parameter, auto* gradient) { square_update(of, parameter, gradient, scratch); });
}

// How the update goes on once it is clipped.
struct Clipped {
    float step, keep, beta1;
};

// From the sums of squares above.
DEVICE Clipped clipped(const Factored& of, double* scratch) {
    const Adafactor& h = of.h;
    double updates = 0, parameters = 0;
    for (int i = threadIdx.x; i < of.parts; i += blockDim.x) updates += of.partial[i], parameters += of.partial[of.parts + i];
    updates = block_sum(updates, scratch);
    parameters = block_sum(parameters, scratch);
    const double count = double(of.rows) * double(of.width);
    const double rms = sqrt(parameters / count);
    const double lr = h.scales_parameter ? h.learning_rate * (rms > h.eps2 ? rms : h.eps2) : h.learning_rate;
    const double excess = sqrt(updates / count) / h.clip_threshold;
    return {float(lr / (excess > 1.0 || excess != excess ? excess : 1.0)), float(1.0 - h.weight_decay * lr), float(h.beta1)};
}

// p = p * keep - update.
template <class P, class G>
DEVICE void apply(const Parameter& of, const Clipped& by, const float* row_factor, const float* col_factor, P* parameter, const G* gradient) {
    float* first_moment = of.first_moment;
    const int width = of.width, first = (blockIdx.x - of.first_part) * of.rows_each, end = min(first + of.rows_each, of.rows);
    for (int row = first; row < end; row++) {
        const uint64_t key = of.rounding.is_stochastic ? noise_key(of.rounding, row) : 0;
        for (int i = threadIdx.x; i < width; i += blockDim.x) {
            const size_t at = size_t(row) * width + i;
            float update = to_float(gradient[at]) * row_factor[row] * col_factor[i] * by.step;
            if (first_moment) {
                update = first_moment[at] * by.beta1 + update * (1.0f - by.beta1);
                first_moment[at] = update;
            }
            put(parameter[at], to_float(parameter[at]) * by.keep - update, of.rounding, key, i);
        }
    }
}
// A block rows_each rows. Shared memory: 32 f64.
KERNEL_OF_BLOCKS(256, 5, adafactor_apply, const Factored* table, int count) {
    SHARED(double, scratch);
    const Factored& entry = entry_of<Factored>(table, count, &Factored::first_part, blockIdx.x);
    const Clipped by = clipped(entry, scratch);
    const Parameter of = entry;
    const float *row_factor = entry.row_factor, *col_factor = entry.col_factor;
    with_elements(of, [&](auto* parameter, auto* gradient) { apply(of, by, row_factor, col_factor, parameter, gradient); });
}

struct Adamw {
    float scale, beta1, beta2;
    float new1, new2; // 1 - beta
    float rate;       // the learning rate over the first moment's correction
    float root;       // the root of the second moment's correction
    float eps;
    float keep; // the factor of weight decay
};

// The update of a parameter by AdamW.
struct Decayed : Parameter {
    Adamw h;
    uint32_t unused; // in the place of padding
    float* second_moment;
};

template <class P, class G>
DEVICE void apply_adamw(const Decayed& of, P* parameter, const G* gradient) {
    const Adamw& h = of.h;
    const int width = of.width, first = (blockIdx.x - of.first_part) * of.rows_each, end = min(first + of.rows_each, of.rows);
    for (int row = first; row < end; row++) {
        const uint64_t key = of.rounding.is_stochastic ? noise_key(of.rounding, row) : 0;
        for (int i = threadIdx.x; i < width; i += blockDim.x) {
            const size_t at = size_t(row) * width + i;
            const float g = to_float(gradient[at]) * h.scale;
            const float m = of.first_moment[at] * h.beta1 + g * h.new1;
            const float v = of.second_moment[at] * h.beta2 + g * g * h.new2;
            of.first_moment[at] = m;
            of.second_moment[at] = v;
            put(parameter[at], to_float(parameter[at]) * h.keep - h.rate * m / (sqrtf(v) / h.root + h.eps), of.rounding, key, i);
        }
    }
}
// A block rows_each rows.
KERNEL_OF_BLOCKS(256, 5, adamw, const Decayed* table, int count) {
    const Decayed of = entry_of<Decayed>(table, count, &Decayed::first_part, blockIdx.x);
    with_elements(of, [&](auto* parameter, auto* gradient) { apply_adamw(of, parameter, gradient); });
}

// A weight and its copy in bf16, in blocks of so many elements from `first_block` on.
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
    const int end = left < NARROWED ? int(left) : NARROWED;
    for (int i = threadIdx.x; i < end; i += blockDim.x) from_float(of.to[first + i], of.from[first + i]);
}

// sum += x, element by element; bf16 are added in f32.
template <class T>
DEVICE void add(T* sum, const T* x, size_t count) {
    for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x)
        from_float(sum[i], to_float(sum[i]) + to_float(x[i]));
}
KERNEL(256, add_f32, float* sum, const float* x, size_t count) { add(sum, x, count); }
KERNEL(256, add_bf16, bf16* sum, const bf16* x, size_t count) { add(sum, x, count); }

// y = x * factor, rounded once. Every zero is positive, as candle's product and sum give it.
template <class T>
DEVICE void scaled(const T* x, T* y, float factor, size_t count) {
    for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x)
        from_float(y[i], to_float(x[i]) * factor + 0.0f);
}
KERNEL(256, scaled_f32, const float* x, float* y, float factor, size_t count) { scaled(x, y, factor, count); }
KERNEL(256, scaled_bf16, const bf16* x, bf16* y, float factor, size_t count) { scaled(x, y, factor, count); }
