//! Texts in the form that nvcc writes.

use crate::{Contraction, Error, translate};

const HEAD: &str = ".version 9.0\n.target sm_80\n.address_size 64\n";

/// The C++ of a kernel with these registers and instructions, without the code around them.
fn body(lines: &str, contraction: Contraction) -> Result<Vec<String>, Error> {
    let ptx = format!(
        "{HEAD}\t// .globl k\n.visible .entry k(\n.param .u64 k_param_0,\n.param .align 8 .b8 k_param_1[24]\n)\n.maxntid 64, 1, 1\n\
         {{\n{lines}\nret;\n}}\n"
    );
    let cpp = translate(&ptx, "file", "ptx.h", contraction)?;
    assert!(cpp.contains("PTX_KERNEL(k, \"file\", 64, {8, 24})"), "{cpp}");
    let inside = cpp.split_once("(void)CC;\n").unwrap().1.split_once("return;").unwrap().0;
    Ok(inside.lines().map(str::to_owned).collect())
}

#[track_caller]
fn assert_translates(ptx: &str, cpp: &str) {
    assert_eq!(body(ptx, Contraction::Nowhere).unwrap(), [cpp], "{ptx}");
}

#[test]
fn instructions_are_calls_of_their_names() {
    assert_translates("add.s32 \t%r3, %r1, -4;", "r3 = add_s32(r1, -4);");
    assert_translates("@!%p1 mul.f32 %f2, %f1, 0f3F800000;", "if (!p1) { f2 = mul_f32(f1, 0x3F800000u); }");
    assert_translates("mov.u32 %r1, %tid.x;", "r1 = mov_u32(tid_x());");
    assert_translates("mov.u64 %rd1, table$1;", "rd1 = mov_u64(symbol(table$1));");
    assert_translates("and.b64 %rd1, %rd2, -9223372036854775808;", "rd1 = and_b64(rd2, 0x8000000000000000ull);");
    assert_translates("mad.lo.cc.u32 %r1, %r2, %r3, %r4;", "r1 = mad_lo_cc_u32(CC, r2, r3, r4);");
    assert_translates("addc.u32 %r1, %r2, 0;", "r1 = addc_u32(CC, r2, 0);");
}

#[test]
fn what_threads_do_together_has_its_line() {
    // The eleventh line of the text.
    assert_translates("bar.sync 0;", "bar_sync(11, 0);");
    assert_translates(
        "shfl.sync.bfly.b32 %r2|%p1, %r1, 16, 31, -1;",
        "r2 = shfl_sync_bfly_b32(11, p1, r1, 16, 31, -1);",
    );
    assert_translates(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1,%f2,%f3,%f4}, {%r1,%r2,%r3,%r4}, {%r5,%r6}, {%f1,%f2,%f3,%f4};",
        "mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(11, f1, f2, f3, f4, r1, r2, r3, r4, r5, r6, f1, f2, f3, f4);",
    );
    assert_translates(
        "cp.async.cg.shared.global [%r1], [%rd2+16], 16, %r3;",
        "cp_async_cg_shared_global(11, r1, rd2 + (16), 16, r3);",
    );
}

#[test]
fn memory_has_its_space_its_type_and_its_sign() {
    assert_translates(
        "ld.param.u64 %rd1, [k_param_1+8];",
        "check_aligned(symbol(k_param_1) + (8), sizeof(uint64_t) * 1); rd1 = load<uint64_t, Space::Param>(symbol(k_param_1) + (8));",
    );
    assert_translates(
        "ld.global.nc.s8 %rs1, [%rd1+-1];",
        "check_aligned(rd1 + (-1), sizeof(int8_t) * 1); rs1 = load<int8_t, Space::Global>(rd1 + (-1));",
    );
    assert_translates(
        "st.shared.f32 [%r1], %f1;",
        "check_aligned(r1, sizeof(uint32_t) * 1); store<uint32_t, Space::Shared>(r1, f1);",
    );
    assert_translates(
        "ld.shared.v2.f32 {%f1, %f2}, [%r1+4];",
        "{ uint64_t at = r1 + (4); check_aligned(r1 + (4), sizeof(uint32_t) * 2); \
         f1 = load<uint32_t, Space::Shared>(at + sizeof(uint32_t) * 0); f2 = load<uint32_t, Space::Shared>(at + sizeof(uint32_t) * 1); }",
    );
}

#[test]
fn registers_scopes_and_labels_are_those_of_the_text() {
    let text = ".reg .pred %p<2>;\n.reg .f32 %f<3>;\n$L__BB0_1:\n@%p1 bra $L__BB0_1;\n{ .reg .b32 tmp; mov.b64 {tmp, %r65}, %rd4; }\n\
                mov.b64 %rd1, {%r1, %r2};";
    assert_eq!(
        body(text, Contraction::Nowhere).unwrap(),
        [
            "bool p0, p1;",
            "uint32_t f0, f1, f2;",
            "$L__BB0_1:;",
            "if (p1) { goto $L__BB0_1; }",
            "{",
            "uint32_t tmp;",
            "{ auto whole = rd4; tmp = part<0, 2>(whole); r65 = part<1, 2>(whole); }",
            "}",
            "rd1 = whole(r1, r2);",
        ]
    );
}

#[test]
fn functions_get_what_they_return_and_what_they_are_given() {
    let text = format!(
        "{HEAD}.func  (.param .b64 func_retval0) power\n(\n.param .b64 power_param_0\n)\n;\n.const .align 4 .b8 TABLE[2] = {{1, 2}};\n\
         .extern .shared .align 16 .b8 tile[];\n.func (.param .b64 func_retval0) power(\n.param .b64 power_param_0\n)\n{{\nret;\n}}\n\
         .visible .entry k()\n.maxntid 32, 1, 1\n{{\n{{ // callseq 0, 0\n.param .b64 param0;\n.param .b64 retval0;\n\
         call.uni (retval0), \npower, \n(\nparam0\n);\n}}\n}}\n"
    );
    let cpp = translate(&text, "file", "ptx.h", Contraction::Nowhere).unwrap();
    for line in [
        "static void power(uint8_t* func_retval0, const uint8_t* power_param_0);\n",
        "static void power(uint8_t* func_retval0, const uint8_t* power_param_0)\n{\n",
        "alignas(16) static const uint8_t TABLE[2] = {1, 2};\n",
        "static const uint32_t tile = shared_symbol();\n",
        "alignas(16) uint8_t param0[8];\n",
        "power(retval0, param0);\n",
    ] {
        assert!(cpp.contains(line), "{line}\n{cpp}");
    }
}

#[test]
fn products_are_contracted_where_nothing_says_how_they_round() {
    let contracted = |text: &str| body(text, Contraction::Everywhere).unwrap().pop().unwrap();
    let product = "mul.f32 %f3, %f1, %f2;\n";
    for (sum, cpp) in [
        ("add.f32 %f5, %f3, %f4;", "f5 = product_plus_f32(f1, f2, f4);"),
        ("add.f32 %f5, %f4, %f3;", "f5 = product_plus_f32(f1, f2, f4);"),
        ("sub.f32 %f5, %f3, %f4;", "f5 = product_minus_f32(f1, f2, f4);"),
        ("sub.f32 %f5, %f4, %f3;", "f5 = minus_product_f32(f1, f2, f4);"),
        // This sum names its rounding.
        ("add.rn.f32 %f5, %f3, %f4;", "f5 = add_rn_f32(f3, f4);"),
    ] {
        let text = format!("ld.global.v2.f32 {{%f1, %f2}}, [%rd1];\n{product}{sum}");
        assert_eq!(contracted(&text), cpp);
        // An operand that gets another value in between is no longer the product's.
        let text = format!("ld.global.v2.f32 {{%f1, %f2}}, [%rd1];\n{product}mov.f32 %f1, 0f00000000;\n{sum}");
        assert!(!contracted(&text).contains("product"), "{text}");
    }
    let text = "ld.global.v2.f32 {%f1, %f2}, [%rd1];\nmul.rn.f32 %f3, %f1, %f2;\nadd.f32 %f5, %f3, %f4;";
    assert_eq!(contracted(text), "f5 = add_f32(f3, f4);");
}

#[test]
fn a_text_that_nvcc_does_not_write_is_an_error_with_its_line() {
    for (text, problem) in [
        ("ld.volatile.global.u32 %r1, [%rd1];", "no way to load or store is known as .volatile"),
        ("mov.u32 %r1, %tid.w;", "no operand of PTX: %tid.w"),
        ("add.s32 5, %r1, %r2;", "expected a register for a result, got 5"),
        ("add.s32 %r1, , %r2;", "an operand is missing"),
        (".reg .b128 %q<2>;", "no registers are .b128"),
        (".shared .b8 tile[4];", "expected .reg, .local or .param within a function, got .shared"),
    ] {
        let error = body(text, Contraction::Nowhere).unwrap_err();
        assert!(error.problem.contains(problem), "{text}: {error}");
        assert!(error.to_string().starts_with("line 1"), "{error}");
    }
}
