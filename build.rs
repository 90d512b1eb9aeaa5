//! Prepares the copy kernels: images for the device (feature `cuda`) and a build for the CPU (feature
//! `cpu-kernels`). Without these features it does nothing; in the normal case it prints nothing.
//!
//! Images. If an nvcc is found, `kernels/*.cu` become compressed fatbins; else the committed PTX is taken,
//! which any driver compiles when it loads it. Search order: `SAPWOOD_NVCC` (a path, or `none`),
//! `CUDA_HOME`, `CUDA_PATH`, `PATH`, then the PyPI wheels in the venv named by `SAPWOOD_NVCC_VENV`.
//! `SAPWOOD_CUDA_ARCHS` (default `80,90,100,120`) overrides the architectures and
//! `SAPWOOD_REQUIRE_NVCC=1` turns the fallback into an error, for release builds.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Image, source, extra flag, lowest architecture.
const IMAGES: [(&str, &str, &str, u32); 3] = [
    ("kv_copy_small", "kernels/kv_copy.cu", "-DKVX_SMALL", 80),
    ("kv_copy_large", "kernels/kv_copy.cu", "-DKVX_LARGE", 80),
    ("kv_bulk", "kernels/kv_bulk.cu", "-DKVX_BULK", 90),
];

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=kernels");
    if env::var_os("CARGO_FEATURE_CPU_KERNELS").is_some() {
        build_for_cpu();
    }
    if env::var_os("CARGO_FEATURE_CUDA").is_some() {
        for name in ["SAPWOOD_NVCC", "SAPWOOD_NVCC_VENV", "SAPWOOD_CUDA_ARCHS", "SAPWOOD_REQUIRE_NVCC"] {
            println!("cargo:rerun-if-env-changed={name}");
        }
        if let Err(why) = build_images() {
            println!("cargo:warning=sapwood: {why}");
            std::process::exit(1);
        }
    }
}

#[cfg(feature = "cpu-kernels")]
fn build_for_cpu() {
    let mut build = cc::Build::new();
    build.cpp(true).std("c++17").warnings(true).extra_warnings(true).opt_level(2);
    build.file("kernels/cpu_shim.cpp").file("kernels/cpu_shim_large.cpp").compile("sapwood_cpu_kernels");
}

#[cfg(not(feature = "cpu-kernels"))]
fn build_for_cpu() {}

/// Writes the three images and `kv_kind.txt`, one line that says where they come from.
fn build_images() -> Result<(), String> {
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("no OUT_DIR")?);
    let required = env::var("SAPWOOD_REQUIRE_NVCC").is_ok_and(|v| v == "1");
    let archs = archs()?;
    let failure = match find_nvcc() {
        None => "no nvcc was found".to_string(),
        Some(nvcc) => match compile(&nvcc, &archs, &out) {
            Ok(()) => {
                let list: Vec<_> = archs.iter().map(|a| format!("sm_{a}")).collect();
                return write(&out.join("kv_kind.txt"), format!("fatbin {}", list.join(" ")).as_bytes());
            }
            Err(why) => {
                if !required {
                    println!("cargo:warning=sapwood: {why}; the committed PTX is used instead");
                }
                why
            }
        },
    };
    if required {
        return Err(format!("SAPWOOD_REQUIRE_NVCC is set and {failure}"));
    }
    for (image, ..) in IMAGES {
        let path = Path::new("kernels/ptx").join(image).with_extension("ptx");
        let mut ptx = std::fs::read(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        ptx.push(0); // the driver reads PTX as a C string
        write(&out.join(image).with_extension("img"), &ptx)?;
    }
    write(&out.join("kv_kind.txt"), b"ptx")
}

fn archs() -> Result<Vec<u32>, String> {
    let list = env::var("SAPWOOD_CUDA_ARCHS").unwrap_or_else(|_| "80,90,100,120".into());
    let parse =
        |a: &str| a.trim().parse::<u32>().map_err(|_| format!("SAPWOOD_CUDA_ARCHS: `{a}` is no number"));
    list.split(',').map(parse).collect()
}

fn find_nvcc() -> Option<PathBuf> {
    match env::var_os("SAPWOOD_NVCC") {
        Some(path) if path == "none" => return None,
        Some(path) => return Some(path.into()),
        None => {}
    }
    let homes = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(env::var_os);
    let homes = homes.map(|home| PathBuf::from(home).join("bin"));
    let path = env::var_os("PATH").unwrap_or_default();
    let wheels = env::var_os("SAPWOOD_NVCC_VENV").into_iter().flat_map(|venv| wheel_dirs(Path::new(&venv)));
    let dirs: Vec<_> = homes.chain(env::split_paths(&path)).chain(wheels).collect();
    dirs.into_iter().map(|dir| dir.join("nvcc")).find(|nvcc| nvcc.is_file())
}

/// `lib/python*/site-packages/nvidia/cu13/bin` of a venv.
fn wheel_dirs(venv: &Path) -> Vec<PathBuf> {
    let Ok(pythons) = std::fs::read_dir(venv.join("lib")) else { return Vec::new() };
    let pythons = pythons.filter_map(|entry| Some(entry.ok()?.path()));
    pythons.map(|p| p.join("site-packages/nvidia/cu13/bin")).collect()
}

fn compile(nvcc: &Path, archs: &[u32], out: &Path) -> Result<(), String> {
    for (image, source, flag, lowest) in IMAGES {
        let mut command = Command::new(nvcc);
        command.args(["-O3", "-std=c++17", "-fatbin", "-Xfatbin", "-compress-all", flag]);
        for arch in archs.iter().filter(|&&a| a >= lowest) {
            command.arg("-gencode").arg(format!("arch=compute_{arch},code=sm_{arch}"));
        }
        command.arg("-gencode").arg(format!("arch=compute_{lowest},code=compute_{lowest}"));
        command.arg("-o").arg(out.join(image).with_extension("img")).arg(source);
        let ran = command.output().map_err(|e| format!("{}: {e}", nvcc.display()))?;
        if !ran.status.success() {
            let text = String::from_utf8_lossy(&ran.stderr);
            let line = text
                .lines()
                .find(|l| l.contains("error") || l.contains("fatal"))
                .unwrap_or("no reason given");
            return Err(format!("nvcc cannot compile {source}: {line}"));
        }
    }
    Ok(())
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), String> {
    std::fs::write(path, bytes).map_err(|e| format!("{}: {e}", path.display()))
}
