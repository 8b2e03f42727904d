//! Enters the kernel from a single place, which the filter knows; and reads the registers of a call that trapped.

/// The six arguments of a system call.
pub type Arguments = [u64; 6];

// The only `syscall` instruction that does not trap: the filter compares the address behind it.
#[cfg(target_arch = "x86_64")]
core::arch::global_asm!(
    ".hidden fault_points_enter",
    ".globl fault_points_enter",
    "fault_points_enter:",
    "mov rax, rdi",
    "mov r11, rsi",
    "mov rdi, [r11]",
    "mov rsi, [r11 + 8]",
    "mov rdx, [r11 + 16]",
    "mov r10, [r11 + 24]",
    "mov r8, [r11 + 32]",
    "mov r9, [r11 + 40]",
    "syscall",
    ".hidden fault_points_entered",
    ".globl fault_points_entered",
    "fault_points_entered:",
    "ret",
);
#[cfg(target_arch = "aarch64")]
core::arch::global_asm!(
    ".hidden fault_points_enter",
    ".globl fault_points_enter",
    "fault_points_enter:",
    "mov x8, x0",
    "mov x9, x1",
    "ldp x0, x1, [x9]",
    "ldp x2, x3, [x9, 16]",
    "ldp x4, x5, [x9, 32]",
    "svc 0",
    ".hidden fault_points_entered",
    ".globl fault_points_entered",
    "fault_points_entered:",
    "ret",
);

unsafe extern "C" {
    fn fault_points_enter(number: i64, arguments: *const u64) -> i64;
    static fault_points_entered: u8;
}

/// Makes a system call that does not trap. Returns the kernel's result: a negative number is an error.
pub fn enter(number: i64, arguments: &Arguments) -> i64 {
    // SAFETY: the arguments are those of the program's own call, or of a call that only touches memory that its caller owns.
    unsafe { fault_points_enter(number, arguments.as_ptr()) }
}

/// The address that the kernel reports for [`enter`]'s call.
pub fn address() -> u64 {
    (&raw const fault_points_entered) as u64
}

/// The registers of the call that trapped.
pub struct Registers<'a> {
    context: &'a mut libc::mcontext_t,
}

impl Registers<'_> {
    /// Wraps the registers in a signal's frame.
    ///
    /// # Safety
    /// `context` is the pointer that the kernel passed to a handler with `SA_SIGINFO` that has not returned.
    pub unsafe fn from_context(context: *mut libc::c_void) -> Self {
        // SAFETY: as promised by the caller.
        Self { context: unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext } }
    }

    /// The number of the call and its arguments.
    #[cfg(target_arch = "x86_64")]
    pub fn call(&self) -> (i64, Arguments) {
        let register = |name: i32| self.context.gregs[name as usize];
        let names = [libc::REG_RDI, libc::REG_RSI, libc::REG_RDX, libc::REG_R10, libc::REG_R8, libc::REG_R9];
        (register(libc::REG_RAX), names.map(|name| register(name) as u64))
    }

    /// The number of the call and its arguments.
    #[cfg(target_arch = "aarch64")]
    pub fn call(&self) -> (i64, Arguments) {
        let registers = &self.context.regs;
        (registers[8] as i64, std::array::from_fn(|at| registers[at]))
    }

    /// Lets the program continue after the call with this result.
    pub fn give(self, result: i64) {
        #[cfg(target_arch = "x86_64")]
        {
            self.context.gregs[libc::REG_RAX as usize] = result;
        }
        #[cfg(target_arch = "aarch64")]
        {
            self.context.regs[0] = result as u64;
        }
    }
}
