//! The `sapwood` command-line tool.

fn main() -> std::process::ExitCode {
    eprintln!("sapwood: no command yet");
    std::process::ExitCode::from(2)
}
