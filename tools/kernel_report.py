#!/usr/bin/env python3
"""What the compiler made of every kernel, for every chip: registers, shared and tensor memory, spills, and the matrix and copy
instructions found in the machine code. Exit status 1 if a kernel spills, touches local memory, or lacks an instruction that it is
about; 77 if there is nothing to look at it with.

  tools/kernel_report.py                    of build/, as a table
  tools/kernel_report.py --build DIR --json
  tools/kernel_report.py --image FILE       of a fat binary, or of a cubin; --part: which need not have all of the library's kernels
  tools/kernel_report.py --fetch            installs cuobjdump and nvdisasm (PyPI: nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm) into
                                            build-pip/ if they are not there
"""
import argparse
import glob
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FETCHED = os.path.join(ROOT, "build-pip", "disassembler")
PACKAGES = ["nvidia-cuda-cuobjdump", "nvidia-cuda-nvdisasm"]

# Columns of the table: heading, and the start of the instructions that it counts.
COUNTED = [("wgmma", r"HGMMA"), ("tcgen05", r"UTC[HQ]MMA"), ("scales", r"UTCCP"), ("commit", r"UTCBAR"), ("tmem ld", r"LDTM"), ("tensor ld", r"UTMALDG"),
           ("bulk", r"UBLKCP"), ("clc", r"UGETNEXTWORKID"), ("local", r"(LDL|STL)\b")]

# What kernels are about: chip, kernel, instructions that must be there.
GEMM = r"gate_up|down|wgrad|_fused"
SCALED_ONLY = r"scaled_|_(wide|narrow)_mx"
SCALED = rf"{SCALED_ONLY}|_fused_mx"
REQUIRED = [
    ("sm_90", GEMM, [r"HGMMA\.64x(128|256)x16\.F32\.BF16", r"UTMALDG"]),
    ("sm_10", rf"^(?!.*({SCALED_ONLY})).*({GEMM})", [r"UTCHMMA\.2CTA"]),
    ("sm_10", SCALED, [r"UTCQMMA\.2CTA", r"UTCCP\.T\.S\.2CTA"]),
    ("sm_10", GEMM, [r"UTCBAR\.2CTA\.MULTICAST", r"LDTM\.16dp256bit", r"UTMALDG\.[23]D\.2CTA", r"UTCATOMSWS\.2CTA"]),
    ("sm_", r"s1_dispatch|_fused", [r"UBLKCP"]),
    ("sm_10", r"_fused", [r"UGETNEXTWORKID"]),
]


def find(program):
    """A CUDA tool: in PATH, beside nvcc, among Python packages, or fetched."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    places = [shutil.which(program), os.path.join(os.path.dirname(os.path.realpath(nvcc)), program)]
    for base in [FETCHED] + sys.path:
        places += glob.glob(os.path.join(base, "nvidia", "*", "bin", program))
        places += glob.glob(os.path.join(base, "triton", "backends", "nvidia", "bin", program))
    for place in places:
        if place and os.access(place, os.X_OK):
            return place
    return None


def fetch():
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--root-user-action=ignore", "--upgrade", "--target", FETCHED] + PACKAGES, check=True)
    for path in glob.glob(os.path.join(FETCHED, "nvidia", "*", "bin", "*")):
        os.chmod(path, 0o755)


def output(*command, cwd=None):
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True).stdout


def launch_shapes():
    """Dynamic shared memory of each kernel, from the one list that the host launches by."""
    with tempfile.TemporaryDirectory() as folder:
        source, program = os.path.join(folder, "list.c"), os.path.join(folder, "list")
        with open(source, "w") as f:
            f.write('#include <stdio.h>\n#include "cuda/host/kernels.h"\n#define PRINT(name, threads, shared, cluster, ...) '
                    'printf("%s %u\\n", #name, (unsigned)(shared));\nint main(void) { MK_CUDA_KERNEL_LIST(PRINT) return 0; }\n')
        include = ["-I" + os.path.join(ROOT, "src"), "-I" + os.path.join(ROOT, "include")]
        subprocess.run([os.environ.get("CC", "cc"), "-std=c11"] + include + [source, "-o", program], check=True)
        return {name: int(size) for name, size in (line.split() for line in output(program).splitlines())}


def resources(cuobjdump, cubin):
    """{kernel: {reg, stack, shared, local}}"""
    found, name = {}, None
    for line in output(cuobjdump, "-res-usage", cubin).splitlines():
        function = re.match(r"\s*Function (\S+):", line)
        if function:
            name = function.group(1)
        elif name and "REG:" in line:
            found[name] = {key.lower(): int(value) for key, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", line)}
            name = None
    return found


def instructions(nvdisasm, cubin):
    """The chip, and {kernel: [instruction with its operands]}"""
    found, name = {}, None
    text = output(nvdisasm, "-c", cubin)
    for line in text.splitlines():
        section = re.match(r"\.section\s+\.text\.(\S+?),|\s*\.text\.(\S+):", line)
        if section:
            name = section.group(1) or section.group(2)
            found.setdefault(name, [])
            continue
        code = re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;", line)
        if code and name:
            found[name].append(code.group(1))
    return re.search(r"\.target\s+(sm_\d+\w?)", text).group(1), found


def tensor_columns(code):
    """Columns of tensor memory that a kernel allocates: in units of 32, moved to a register before the allocation."""
    unit = 0
    for i, instruction in enumerate(code):
        if not instruction.startswith("UTCATOMSWS") or "FIND_AND_SET" not in instruction:
            continue
        for earlier in reversed(code[max(i - 8, 0):i]):
            moved = re.match(r"UMOV UR\d+, (0x[0-9a-f]+)", earlier)
            if moved:
                unit = int(moved.group(1), 16)
                break
    return 32 * unit


def look_at(chip, name, use, code, shared):
    row = {"kernel": name, "chip": chip, "registers": use["reg"], "shared": use["shared"] + shared.get(name, 0), "tensor_columns": tensor_columns(code),
           "stack": use["stack"], "instructions": len(code)}
    for heading, pattern in COUNTED:
        row[heading] = sum(1 for i in code if re.match(pattern, i))
    wrong = []
    if use["stack"] or use["local"] or row["local"]:
        wrong.append("local memory: %d bytes of stack, %d instructions" % (use["stack"], row["local"]))
    for chips, kernels, patterns in REQUIRED:
        if chip.startswith(chips) and re.search(kernels, name):
            wrong += ["no %s" % p.replace("\\", "") for p in patterns if not any(re.match(p, i) for i in code)]
    row["wrong"] = wrong
    return row


def report(image, cuobjdump, nvdisasm, part):
    shared, rows = launch_shapes(), []
    with tempfile.TemporaryDirectory() as folder:
        if image.endswith(".cubin"):
            cubins = [os.path.abspath(image)]
        else:
            output(cuobjdump, "-xelf", "all", os.path.abspath(image), cwd=folder)
            cubins = sorted(glob.glob(os.path.join(folder, "*.cubin")))
        for cubin in cubins:
            chip, code = instructions(nvdisasm, cubin)
            for name, use in sorted(resources(cuobjdump, cubin).items()):
                rows.append(look_at(chip, name, use, code.get(name, []), shared))
            for name in [] if part else sorted(set(shared) - set(code)):
                rows.append({"kernel": name, "chip": chip, "wrong": ["missing from the image"]})
    return rows


def print_table(rows):
    headings = ["kernel", "chip", "registers", "shared", "tensor_columns"] + [h for h, _ in COUNTED]
    titles = ["kernel", "chip", "regs", "shared", "tmem"] + [h for h, _ in COUNTED]
    cells = [titles] + [[str(r.get(h, "")) if r.get(h, "") != 0 or h == "registers" else "." for h in headings] for r in rows]
    widths = [max(len(c[i]) for c in cells) for i in range(len(titles))]
    for c in cells:
        print("  ".join(v.ljust(w) if i < 2 else v.rjust(w) for i, (v, w) in enumerate(zip(c, widths))))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=os.path.join(ROOT, "build"))
    parser.add_argument("--image")
    parser.add_argument("--part", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--fetch", action="store_true")
    arguments = parser.parse_args()
    image = arguments.image or os.path.join(arguments.build, "src", "cuda", "kernels.fatbin")
    if arguments.fetch and not (find("cuobjdump") and find("nvdisasm")):
        fetch()
    if not os.path.exists(image):
        print("SKIP kernel_report: there is no %s (built without nvcc?)" % image)
        return 77
    cuobjdump, nvdisasm = find("cuobjdump"), find("nvdisasm")
    if not cuobjdump or not nvdisasm:
        print("SKIP kernel_report: no cuobjdump and nvdisasm; --fetch gets them")
        return 77
    rows = report(image, cuobjdump, nvdisasm, arguments.part)
    if arguments.json:
        print(json.dumps(rows, indent=1))
    else:
        print_table(rows)
    wrong = [r for r in rows if r["wrong"]]
    for r in wrong:
        print("FAIL kernel_report %s, %s: %s" % (r["kernel"], r["chip"], "; ".join(r["wrong"])), file=sys.stderr)
    if not wrong and not arguments.json:
        print("PASS kernel_report (%d kernels)" % len(rows))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
