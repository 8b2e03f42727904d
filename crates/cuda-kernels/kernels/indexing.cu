// Elements by number along one dimension, with the names and arguments that candle's `cuda_backend` launches the kernels with.
//
// A tensor is (left, size, right): the indexed dimension, the dimensions before it and the dimensions after it.
#include "elements.h"

// Whether an index means no element: the greatest u8 or u32, by candle's convention, or an index outside of the dimension.
template <class I>
DEVICE bool is_none(I id, size_t size) {
    return id == I(-1) || uint64_t(id) >= size;
}

template <class T>
DEVICE T zero() {
    T x;
    assign(x, 0);
    return x;
}

// to[l][i][r] = from[l][ids[i]][r]; zero for no element.
#define INDEX_SELECT(id, I, suffix, T) \
    KERNEL(1024, is_##id##_##suffix, size_t count, size_t dims, const size_t* layout, const I* ids, const T* from, T* to, size_t, \
           size_t from_size, size_t to_size, size_t right) { \
        each_element(count, [=](size_t i) { \
            const I source = ids[place(i / right % to_size, dims, layout)]; \
            const size_t row = i / (to_size * right) * from_size + size_t(source); \
            to[i] = is_none(source, from_size) ? zero<T>() : from[row * right + i % right]; \
        }); \
    }

// to[l][i][r] = from[l][ids[l][i][r]][r]; zero for no element.
#define ELEMENT_GATHER(id, I, suffix, T) \
    KERNEL(1024, gather_##id##_##suffix, size_t count, const I* ids, const T* from, T* to, size_t, size_t from_size, size_t to_size, \
           size_t right) { \
        each_element(count, [=](size_t i) { \
            const size_t row = i / (to_size * right) * from_size + size_t(ids[i]); \
            to[i] = is_none(ids[i], from_size) ? zero<T>() : from[row * right + i % right]; \
        }); \
    }

struct Replace {
    template <class T>
    DEVICE void operator()(T& to, T x) const {
        to = x;
    }
};
struct Add {
    template <class T>
    DEVICE void operator()(T& to, T x) const {
        assign(to, wide(to) + wide(x));
    }
};

// For each element of `from` (left, from_size, right): update(to[l][id][r], from[l][i][r]). A thread has all elements of its l and its r,
// in their order, so no two threads write one element. `ids` has an index for each element, or for each i.
template <bool OF_EACH_ELEMENT, class I, class T, class U>
DEVICE void update_columns(const I* ids, const T* from, T* to, size_t left, size_t from_size, size_t to_size, size_t right, U update) {
    each_element(left * right, [=](size_t column) {
        const size_t l = column / right, r = column % right;
#pragma unroll 1
        for (size_t i = 0; i < from_size; i++) {
            const size_t at = (l * from_size + i) * right + r;
            const I id = ids[OF_EACH_ELEMENT ? at : i];
            if (!is_none(id, to_size)) update(to[(l * to_size + size_t(id)) * right + r], from[at]);
        }
    });
}

#define COLUMNS(id, I, suffix, T) \
    KERNEL(1024, ia_##id##_##suffix, const I* ids, size_t count, const T* from, T* to, size_t left, size_t, size_t to_size, \
           size_t right) { \
        update_columns<false>(ids, from, to, left, count, to_size, right, Add()); \
    } \
    KERNEL(1024, s_##id##_##suffix, const I* ids, const T* from, T* to, size_t left, size_t from_size, size_t to_size, size_t right) { \
        update_columns<true>(ids, from, to, left, from_size, to_size, right, Replace()); \
    } \
    KERNEL(1024, sa_##id##_##suffix, const I* ids, const T* from, T* to, size_t left, size_t from_size, size_t to_size, size_t right) { \
        update_columns<true>(ids, from, to, left, from_size, to_size, right, Add()); \
    }

#define INDEXING(suffix, T) EACH_ID(INDEX_SELECT, suffix, T) EACH_ID(ELEMENT_GATHER, suffix, T) EACH_ID(COLUMNS, suffix, T)
EACH_TYPE(INDEXING)
