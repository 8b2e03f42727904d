//! The launchers of quantised and mixture-of-experts products, with the signatures that candle calls. This project calls none of them.

// candle calls them as functions of C.
#![allow(unsafe_code, non_snake_case)]

use std::ffi::c_void;

/// Declares functions of C that take arguments of these types, and panic.
macro_rules! never_called {
    ($($name:ident)*: $arguments:tt -> $result:ty) => {
        $(never_called!(one $name $arguments $result);)*
    };
    (one $name:ident ($($argument:ty),*) $result:ty) => {
        /// Not implemented.
        ///
        /// # Safety
        /// None: it only panics.
        ///
        /// # Panics
        /// Always. As a function of C it then ends the process.
        pub unsafe extern "C" fn $name($(_: $argument),*) -> $result {
            panic!("{}: this build has no quantised or mixture-of-experts products for a card", stringify!($name))
        }
    };
}

// Weights, products of a vector, columns and rows, strides, the stream.
never_called! {
    launch_mmvq_gguf_q4_0_bf16_plain launch_mmvq_gguf_q4_1_bf16_plain launch_mmvq_gguf_q5_0_bf16_plain
    launch_mmvq_gguf_q5_1_bf16_plain launch_mmvq_gguf_q8_0_bf16_plain launch_mmvq_gguf_q2_k_bf16_plain
    launch_mmvq_gguf_q3_k_bf16_plain launch_mmvq_gguf_q4_k_bf16_plain launch_mmvq_gguf_q5_k_bf16_plain
    launch_mmvq_gguf_q6_k_bf16_plain
    launch_mmvq_gguf_q4_0_f16_plain launch_mmvq_gguf_q4_1_f16_plain launch_mmvq_gguf_q5_0_f16_plain
    launch_mmvq_gguf_q5_1_f16_plain launch_mmvq_gguf_q8_0_f16_plain launch_mmvq_gguf_q2_k_f16_plain
    launch_mmvq_gguf_q3_k_f16_plain launch_mmvq_gguf_q4_k_f16_plain launch_mmvq_gguf_q5_k_f16_plain
    launch_mmvq_gguf_q6_k_f16_plain
    launch_mmvq_gguf_q4_0_f32_plain launch_mmvq_gguf_q4_1_f32_plain launch_mmvq_gguf_q5_0_f32_plain
    launch_mmvq_gguf_q5_1_f32_plain launch_mmvq_gguf_q8_0_f32_plain launch_mmvq_gguf_q2_k_f32_plain
    launch_mmvq_gguf_q3_k_f32_plain launch_mmvq_gguf_q4_k_f32_plain launch_mmvq_gguf_q5_k_f32_plain
    launch_mmvq_gguf_q6_k_f32_plain:
    (*const c_void, *const c_void, *mut c_void, i32, i32, i32, i32, i32, *mut c_void) -> ()
}

// Values, their quantised form, columns, columns with a margin, rows, the stream.
never_called! {
    launch_mmvq_gguf_quantize_q8_1_bf16 launch_mmvq_gguf_quantize_q8_1_f16 launch_mmvq_gguf_quantize_q8_1_f32:
    (*const c_void, *mut c_void, i32, i32, i32, *mut c_void) -> ()
}

// Values, ids, their quantised form, the type, sizes and strides, the stream.
never_called! {
    launch_mmq_quantize_q8_1_D4 launch_mmq_quantize_q8_1_DS4 launch_mmq_quantize_q8_1_D2S6:
    (*const c_void, *const i32, *mut c_void, i32, i64, i64, i64, i64, i64, i64, i64, i64, *mut c_void) -> ()
}

// Scratch, both factors, the product, sizes and strides, facts of the card, the stream.
never_called! {
    launch_mmq_gguf_q4_0 launch_mmq_gguf_q4_1 launch_mmq_gguf_q5_0 launch_mmq_gguf_q5_1 launch_mmq_gguf_q8_0
    launch_mmq_gguf_q2_k launch_mmq_gguf_q3_k launch_mmq_gguf_q4_k launch_mmq_gguf_q5_k launch_mmq_gguf_q6_k:
    (*mut c_void, *const c_void, *const c_void, *mut c_void, i64, i64, i64, i64, i64, i32, i32, i64, i32, *mut c_void)
        -> ()
}

// Input, weights, tokens, experts, weights of experts, output; counts, sizes, dtypes, the stream.
never_called! {
    moe_gemm_wmma:
    (*const c_void, *const c_void, *const i32, *const i32, *const f32, *mut c_void, *mut i32, *mut i32, i32, i32, i32,
     i32, i32, i32, bool, i64) -> ()
}
never_called! {
    moe_gemm_gguf:
    (*const f32, *const c_void, *const i32, *const i32, *const f32, *mut c_void, i32, i32, i32, i32, i32, i32, i64)
        -> ()
}
never_called! {
    moe_gemm_gguf_prefill:
    (*const c_void, *const u8, *const i32, *const i32, *const f32, *mut c_void, i32, i32, i32, i32, i32, i32, i32, i64)
        -> ()
}

// Experts of tokens, tokens in their order, experts of blocks, counts and sizes, the stream.
#[cfg(feature = "cutile")]
never_called! {
    candle_launch_moe_align:
    (*const i32, *mut i32, *mut i32, *mut i32, *mut i32, i32, i32, i32, i32, *mut c_void) -> i32
}
