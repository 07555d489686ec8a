# PID 1 of a sandbox with namespaces, on x86-64: drops all privileges, then sleeps until it is killed.
#
# It is small because every sandbox has one. The kernel reaps its children, since SIGCHLD is ignored from the start; other
# signals have no handler, so none reaches it from inside. If a step fails, it exits, and the sandbox with it. It closes
# descriptor 3, a pipe, when its privileges are dropped.
# tools/build_init.py assembles it into src/fumehood/sandbox_server/inside/init.x86_64.

        .intel_syntax noprefix
        .globl _start
        .set BASE, 0x400000

# ---- the file: an ELF header, one segment, no executable stack ------------------------------------------------------
header: .byte 0x7f, 'E', 'L', 'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0
        .short 2, 62                    # an executable, x86-64
        .long 1
        .quad BASE + _start - header
        .quad segments - header, 0
        .long 0
        .short 64, 56, 2, 0, 0, 0
segments:
        .long 1, 5                      # PT_LOAD, to be read and executed
        .quad 0, BASE, BASE, end - header, end - header, 0x1000
        .long 0x6474e551, 6             # PT_GNU_STACK
        .quad 0, 0, 0, 0, 0, 16

# ---- the program ----------------------------------------------------------------------------------------------------
_start: xor     edx, edx
        xor     r10d, r10d
        xor     r8d, r8d
        mov     edi, 4
        mov     esi, -1
        mov     eax, 436                # close_range(4, ~0, 0): none is open; make sure, if the kernel has the call
        syscall
        xor     ebx, ebx
bound:  mov     edi, 24                 # prctl(PR_CAPBSET_DROP, each)
        mov     esi, ebx
        mov     eax, 157
        syscall
        inc     ebx
        test    eax, eax
        jz      bound
        cmp     eax, -22                # EINVAL: past the last
        jne     fail
        mov     edi, 47                 # prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
        mov     esi, 4
        mov     eax, 157
        syscall
        test    eax, eax
        jnz     fail
        lea     rdi, [rip + capabilities]
        lea     rsi, [rip + none]
        mov     eax, 126                # capset
        syscall
        test    eax, eax
        jnz     fail
        mov     edi, 38                 # prctl(PR_SET_NO_NEW_PRIVS, 1)
        mov     esi, 1
        mov     eax, 157
        syscall
        test    eax, eax
        jnz     fail
        mov     edi, 4                  # prctl(PR_SET_DUMPABLE, 0)
        xor     esi, esi
        mov     eax, 157
        syscall
        test    eax, eax
        jnz     fail
        mov     edi, 22                 # prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filter)
        mov     esi, 2
        lea     rdx, [rip + filter]
        mov     eax, 157
        syscall
        test    eax, eax
        jnz     fail
        xor     ebx, ebx
close:  mov     edi, ebx                # close: 0, 1, 2, 3
        mov     eax, 3
        syscall
        inc     ebx
        cmp     ebx, 4
        jne     close
sleep:  mov     eax, 34                 # pause
        syscall
        jmp     sleep
fail:   mov     edi, 1
        mov     eax, 231                # exit_group
        syscall

        .balign 8
filter: .quad   7                       # struct sock_fprog
        .quad   BASE + rules - header
rules:  .quad   0x0000000400000020      # load the architecture
        .quad   0xc000003e04000015      # x86-64? else to the end
        .quad   0x0000000000000020      # load the number of the call
        .quad   0x0000002200010015      # pause, to where it is allowed
        .quad   0x0000000301000015      # or close? else to the end
        .quad   0x7fff000000000006      # allowed
        .quad   0x8000000000000006      # the process is killed
capabilities:
        .long   0x20080522, 0           # version 3, of this process
none:   .quad   0, 0, 0
end:
