// Sums of squares of gradients, Adafactor, AdamW, and rounding of what they update. Parameters are matrices (rows, width); a vector is one row.
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

// Columns that one block works on.
constexpr int COLUMNS = 1024;
// Rows whose squares are added in f32 before they are added in f64.
constexpr int BLOCK_ROWS = 32;

// Squares of rows blockIdx.x * rows_each on, in columns blockIdx.y * COLUMNS on. of_rows (rows, gridDim.y) gets sums by row,
// of_columns (gridDim.x, width) sums by column. Shared memory: 2 * COLUMNS + 32 f64.
template <class G>
DEVICE void square_sums(const G* gradient, float* of_rows, double* of_columns, int rows, int rows_each, int width) {
    SHARED(double, totals);
    float* sums = reinterpret_cast<float*>(totals + COLUMNS);
    float* scratch = sums + COLUMNS;
    const int first = blockIdx.x * rows_each, end = min(first + rows_each, rows);
    const int from = blockIdx.y * COLUMNS, columns = min(COLUMNS, width - from);
    // Each thread has columns of its own.
    for (int i = threadIdx.x; i < columns; i += blockDim.x) totals[i] = 0, sums[i] = 0;
    for (int row = first; row < end; row++) {
        float of_row = 0;
        for (int i = threadIdx.x; i < columns; i += blockDim.x) {
            const float x = to_float(gradient[size_t(row) * width + from + i]);
            sums[i] += x * x;
            of_row += x * x;
        }
        of_row = block_sum(of_row, scratch);
        if (threadIdx.x == 0) of_rows[size_t(row) * gridDim.y + blockIdx.y] = of_row;
        if ((row - first) % BLOCK_ROWS != BLOCK_ROWS - 1 && row != end - 1) continue;
        for (int i = threadIdx.x; i < columns; i += blockDim.x) totals[i] += sums[i], sums[i] = 0;
    }
    for (int i = threadIdx.x; i < columns; i += blockDim.x) of_columns[size_t(blockIdx.x) * width + from + i] = totals[i];
}
KERNEL(256, square_sums_f32, const float* gradient, float* of_rows, double* of_columns, int rows, int rows_each, int width) {
    square_sums(gradient, of_rows, of_columns, rows, rows_each, width);
}
KERNEL(256, square_sums_bf16, const bf16* gradient, float* of_rows, double* of_columns, int rows, int rows_each, int width) {
    square_sums(gradient, of_rows, of_columns, rows, rows_each, width);
}

// The parts of square_sums, added in order: row_sums (rows) of parts (rows, row_parts), col_sums (width) of parts (col_parts, width).
// A thread a sum.
KERNEL(256, finish_square_sums, const float* of_rows, const double* of_columns, float* row_sums, float* col_sums, int rows, int row_parts,
       int col_parts, int width) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < rows) {
        float sum = 0;
        for (int part = 0; part < row_parts; part++) sum += of_rows[size_t(i) * row_parts + part];
        row_sums[i] = sum;
    } else if (i - rows < width) {
        double sum = 0;
        for (int part = 0; part < col_parts; part++) sum += of_columns[size_t(part) * width + (i - rows)];
        col_sums[i - rows] = float(sum);
    }
}

// total[0] = the sum of `count` values; one block. Shared memory: 32 f64.
KERNEL(1024, total_of, const float* values, double* total, int count) {
    SHARED(double, scratch);
    double sum = 0;
    for (int i = threadIdx.x; i < count; i += blockDim.x) sum += double(values[i]);
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) total[0] = sum;
}

// The numbers of one update.
struct Adafactor {
    double learning_rate, beta2, eps1, eps2, clip_threshold, weight_decay, gradient_scale, beta1;
    uint32_t scales_parameter, has_first_moment;
};

// Moves a factored second moment on, and makes the factors of rows and columns whose product with the gradient is the update before it is
// clipped. Block 0 has the rows, the others a thread a column. Shared memory: 32 f64.
KERNEL(1024, adafactor_factors, Adafactor h, const float* row_sums, const float* col_sums, float* row, float* col, float* row_factor,
       float* col_factor, int rows, int width) {
    SHARED(double, scratch);
    const double square = h.gradient_scale * h.gradient_scale;
    if (blockIdx.x > 0) {
        const int i = (blockIdx.x - 1) * blockDim.x + threadIdx.x;
        if (i >= width) return;
        const double moved = h.beta2 * double(col[i]) + (1.0 - h.beta2) * (double(col_sums[i]) * square / rows + h.eps1);
        col[i] = float(moved);
        col_factor[i] = float(1.0 / sqrt(double(col[i])));
        return;
    }
    double sum = 0;
    for (int i = threadIdx.x; i < rows; i += blockDim.x) {
        const double moved = h.beta2 * double(row[i]) + (1.0 - h.beta2) * (double(row_sums[i]) * square / width + h.eps1);
        row[i] = float(moved);
        sum += double(row[i]);
    }
    const double mean = block_sum(sum, scratch) / rows;
    for (int i = threadIdx.x; i < rows; i += blockDim.x) row_factor[i] = float(h.gradient_scale * sqrt(mean / double(row[i])));
}

// The same for the full second moment of a vector: its one row has the gradient's scale as its factor. A thread an element.
template <class G>
DEVICE void adafactor_factors_of_vector(const Adafactor& h, const G* gradient, float* second, float* row_factor, float* col_factor,
                                        int width) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i == 0) row_factor[0] = float(h.gradient_scale);
    if (i >= width) return;
    const double g = double(to_float(gradient[i])) * h.gradient_scale;
    second[i] = float(h.beta2 * double(second[i]) + (1.0 - h.beta2) * (g * g + h.eps1));
    col_factor[i] = 1.0f / sqrtf(second[i]);
}
KERNEL(256, adafactor_factors_of_vector_f32, Adafactor h, const float* gradient, float* second, float* row_factor, float* col_factor,
       int width) {
    adafactor_factors_of_vector(h, gradient, second, row_factor, col_factor, width);
}
KERNEL(256, adafactor_factors_of_vector_bf16, Adafactor h, const bf16* gradient, float* second, float* row_factor, float* col_factor,
       int width) {
    adafactor_factors_of_vector(h, gradient, second, row_factor, col_factor, width);
}

// Squares of the update and of the parameter, of rows_each rows a block: partial (2, gridDim.x). Shared memory: 32 f64.
template <class P, class G>
DEVICE void adafactor_squares(const P* parameter, const G* gradient, const float* row_factor, const float* col_factor, double* partial,
                              int rows, int rows_each, int width) {
    SHARED(double, scratch);
    const int first = blockIdx.x * rows_each, end = min(first + rows_each, rows);
    double updates = 0, parameters = 0;
    for (int row = first; row < end; row++) {
        float of_update = 0, of_parameter = 0;
        for (int i = threadIdx.x; i < width; i += blockDim.x) {
            const size_t at = size_t(row) * width + i;
            const float u = to_float(gradient[at]) * row_factor[row] * col_factor[i], p = to_float(parameter[at]);
            of_update += u * u;
            of_parameter += p * p;
        }
        updates += of_update;
        parameters += of_parameter;
    }
    updates = block_sum(updates, scratch);
    parameters = block_sum(parameters, scratch);
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = updates;
        partial[gridDim.x + blockIdx.x] = parameters;
    }
}

// p = p * keep - update, with the partial sums above of `parts` blocks. `first_moment` may be null. Shared memory: 32 f64.
template <class P, class G>
DEVICE void adafactor_apply(const Adafactor& h, const Rounding& rounding, const double* partial, P* parameter, const G* gradient,
                            float* first_moment, const float* row_factor, const float* col_factor, int parts, int rows, int rows_each,
                            int width) {
    SHARED(double, scratch);
    double updates = 0, parameters = 0;
    for (int i = threadIdx.x; i < parts; i += blockDim.x) updates += partial[i], parameters += partial[parts + i];
    updates = block_sum(updates, scratch);
    parameters = block_sum(parameters, scratch);
    const double count = double(rows) * double(width);
    const double rms = sqrt(parameters / count);
    const double lr = h.scales_parameter ? h.learning_rate * (rms > h.eps2 ? rms : h.eps2) : h.learning_rate;
    const double excess = sqrt(updates / count) / h.clip_threshold;
    const float step = float(lr / (excess > 1.0 || excess != excess ? excess : 1.0));
    const float keep = float(1.0 - h.weight_decay * lr), beta1 = float(h.beta1);
    const int first = blockIdx.x * rows_each, end = min(first + rows_each, rows);
    for (int row = first; row < end; row++) {
        const uint64_t key = rounding.is_stochastic ? noise_key(rounding, row) : 0;
        for (int i = threadIdx.x; i < width; i += blockDim.x) {
            const size_t at = size_t(row) * width + i;
            float update = to_float(gradient[at]) * row_factor[row] * col_factor[i] * step;
            if (first_moment) {
                update = first_moment[at] * beta1 + update * (1.0f - beta1);
                first_moment[at] = update;
            }
            put(parameter[at], to_float(parameter[at]) * keep - update, rounding, key, i);
        }
    }
}

struct Adamw {
    float scale, beta1, beta2;
    float new1, new2; // 1 - beta
    float rate;       // the learning rate over the first moment's correction
    float root;       // the root of the second moment's correction
    float eps;
    float keep; // the factor of weight decay
};

// A block rows_each rows.
template <class P, class G>
DEVICE void adamw(const Adamw& h, const Rounding& rounding, P* parameter, const G* gradient, float* first_moment, float* second_moment,
                  int rows, int rows_each, int width) {
    const int first = blockIdx.x * rows_each, end = min(first + rows_each, rows);
    for (int row = first; row < end; row++) {
        const uint64_t key = rounding.is_stochastic ? noise_key(rounding, row) : 0;
        for (int i = threadIdx.x; i < width; i += blockDim.x) {
            const size_t at = size_t(row) * width + i;
            const float g = to_float(gradient[at]) * h.scale;
            const float m = first_moment[at] * h.beta1 + g * h.new1;
            const float v = second_moment[at] * h.beta2 + g * g * h.new2;
            first_moment[at] = m;
            second_moment[at] = v;
            put(parameter[at], to_float(parameter[at]) * h.keep - h.rate * m / (sqrtf(v) / h.root + h.eps), rounding, key, i);
        }
    }
}

#define OPTIMIZER(suffix, P, G) \
    KERNEL(256, adafactor_squares_##suffix, const P* parameter, const G* gradient, const float* row_factor, const float* col_factor, \
           double* partial, int rows, int rows_each, int width) { \
        adafactor_squares(parameter, gradient, row_factor, col_factor, partial, rows, rows_each, width); \
    } \
    KERNEL(256, adafactor_apply_##suffix, Adafactor h, Rounding rounding, const double* partial, P* parameter, const G* gradient, \
           float* first_moment, const float* row_factor, const float* col_factor, int parts, int rows, int rows_each, int width) { \
        adafactor_apply(h, rounding, partial, parameter, gradient, first_moment, row_factor, col_factor, parts, rows, rows_each, width); \
    } \
    KERNEL(256, adamw_##suffix, Adamw h, Rounding rounding, P* parameter, const G* gradient, float* first_moment, float* second_moment, \
           int rows, int rows_each, int width) { \
        adamw(h, rounding, parameter, gradient, first_moment, second_moment, rows, rows_each, width); \
    }
OPTIMIZER(f32_f32, float, float)
OPTIMIZER(f32_bf16, float, bf16)
OPTIMIZER(bf16_f32, bf16, float)
OPTIMIZER(bf16_bf16, bf16, bf16)

// sum += x, element by element; bf16 are added in f32.
template <class T>
DEVICE void add(T* sum, const T* x, size_t count) {
    for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x)
        from_float(sum[i], to_float(sum[i]) + to_float(x[i]));
}
KERNEL(256, add_f32, float* sum, const float* x, size_t count) { add(sum, x, count); }
KERNEL(256, add_bf16, bf16* sum, const bf16* x, size_t count) { add(sum, x, count); }
