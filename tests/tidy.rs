//! Rules of the house that the compiler does not know: floors, purity, file sizes, where `unsafe` may be.
//!
//! The checks read the text of the sources with comments and literals blanked out, so they see names, not prose.
//! `planted_faults_are_found` plants one fault of each kind and must find each.

use std::fs;
use std::path::{Path, PathBuf};

/// Floors from the ground up. A module may use only modules of lower floors, and itself.
const FLOORS: &[(u8, &[&str])] = &[
    (0, &["base"]),
    (1, &["key", "pool"]),
    (2, &["tree"]),
    (3, &["tiers", "pd"]),
    (4, &["backend"]),
    (5, &["engine"]),
    (6, &["lib", "bin", "sim", "model"]),
];

/// Macros exported at the root of the crate that live on the ground floor.
const ROOT_MACROS: &[&str] = &["invariant"];

/// Highest floor that must be pure.
const PURE_FLOOR_MAX: u8 = 3;

/// What a pure floor may not name: clocks, threads, locks, input and output, randomness, unseeded maps.
const IMPURE: &[&str] = &[
    "Instant",
    "SystemTime",
    "std::thread",
    "std::fs",
    "std::net",
    "std::env",
    "std::process",
    "HashMap",
    "HashSet",
    "RandomState",
    "Mutex",
    "RwLock",
    "Condvar",
    "parking_lot",
    "crossbeam_channel",
    "rand",
];

/// The one place that may name the std maps, to give them a fixed seed.
const CONTAINERS: &str = "src/base/containers.rs";

/// Most lines of a file, its tests not counted.
const LINES_MAX: usize = 1_200;
/// Files above the cap, each with the number it may not exceed.
const LINES_EXCEPTIONS: &[(&str, usize)] = &[];

/// Where `unsafe` may be written.
const UNSAFE_ALLOWED: &[&str] = &["src/backend/", "src/base/prefetch.rs"];

const FORBIDDEN_MACROS: &[&str] = &["todo!", "dbg!", "unimplemented!"];

/// Directories whose sources are read.
const ROOTS: &[&str] = &["src", "tests", "benches", "examples", "fuzz/fuzz_targets", "kernels"];

fn floor(module: &str) -> Option<u8> {
    FLOORS.iter().find(|(_, modules)| modules.contains(&module)).map(|(floor, _)| *floor)
}

/// `text` with comments, string and character literals replaced by spaces; line breaks stay.
fn blanked(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let rest = &bytes[at..];
        let end = match rest[0] {
            b'/' if rest.starts_with(b"//") => at + find(rest, b"\n").unwrap_or(rest.len()),
            b'/' if rest.starts_with(b"/*") => at + block_comment(rest),
            b'"' => at + quoted(rest),
            b'r' | b'b' if !follows_name(bytes, at) => match raw_or_byte(rest) {
                0 => at,
                len => at + len,
            },
            b'\'' => at + character(rest),
            _ => at,
        };
        for byte in &mut out[at..end] {
            if *byte != b'\n' {
                *byte = b' ';
            }
        }
        at = end.max(at + 1);
    }
    String::from_utf8(out).expect("only whole literals were replaced")
}

fn find(bytes: &[u8], what: &[u8]) -> Option<usize> {
    bytes.windows(what.len()).position(|w| w == what)
}

fn follows_name(bytes: &[u8], at: usize) -> bool {
    at > 0 && (bytes[at - 1].is_ascii_alphanumeric() || bytes[at - 1] == b'_')
}

fn block_comment(bytes: &[u8]) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < bytes.len() {
        if bytes[at..].starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if bytes[at..].starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    bytes.len()
}

fn quoted(bytes: &[u8]) -> usize {
    let mut at = 1;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    bytes.len()
}

/// Length of `r".."`, `r#".."#`, `b".."`, `br".."` or `b'.'` at the start, or 0.
fn raw_or_byte(bytes: &[u8]) -> usize {
    let prefix = bytes.iter().take_while(|b| matches!(b, b'r' | b'b')).count();
    let hashes = bytes[prefix..].iter().take_while(|&&b| b == b'#').count();
    let open = prefix + hashes;
    let raw = bytes[..prefix].contains(&b'r');
    match bytes.get(open) {
        Some(b'"') if prefix <= 2 && raw => {
            let close = [b"\"".as_slice(), &b"#".repeat(hashes)].concat();
            open + 1 + find(&bytes[open + 1..], &close).map_or(bytes.len() - open - 1, |n| n + close.len())
        }
        Some(b'"') if prefix == 1 && hashes == 0 => 1 + quoted(&bytes[1..]),
        Some(b'\'') if prefix == 1 && hashes == 0 => 1 + character(&bytes[1..]),
        _ => 0,
    }
}

/// Length of a character literal at the start, or 0 for a lifetime.
fn character(bytes: &[u8]) -> usize {
    if bytes.get(1) == Some(&b'\\') {
        return find(&bytes[2..], b"'").map_or(0, |n| if n == 0 { 4 } else { n + 3 }).min(bytes.len());
    }
    let width = match bytes.get(1) {
        Some(b) if *b < 0x80 => 1,
        Some(b) => b.leading_ones() as usize,
        None => return 0,
    };
    if bytes.get(1 + width) == Some(&b'\'') { width + 2 } else { 0 }
}

/// Byte offset where the unit tests at the end of a file start.
fn tests_from(code: &str) -> usize {
    let at = code.find("\n#[cfg(test)]\nmod ").or_else(|| code.find("\n#[cfg(test)]\npub(crate) mod "));
    at.filter(|&at| !code[at..].lines().nth(2).is_some_and(|l| l.ends_with(';'))).unwrap_or(code.len())
}

fn is_name(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Offsets at which `word` stands with no name character before and after it.
fn words<'a>(code: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    code.match_indices(word).map(|(at, _)| at).filter(move |&at| {
        let before = code[..at].chars().next_back();
        let after = code[at + word.len()..].chars().next();
        !before.is_some_and(is_name) && !after.is_some_and(is_name)
    })
}

/// First names of the paths behind `crate::` or `{super::}*` at the end of `prefix`.
fn heads(rest: &str) -> Vec<&str> {
    let name = |s: &'_ str| s.find(|c| !is_name(c)).unwrap_or(s.len());
    let Some(group) = rest.strip_prefix('{') else { return vec![&rest[..name(rest)]] };
    let (mut depth, mut heads, mut start) = (0, Vec::new(), 0);
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            ',' | '}' if depth == 0 => {
                let part = group[start..at].trim_start();
                if !part.is_empty() {
                    heads.push(&part[..name(part)]);
                }
                start = at + 1;
                if c == '}' {
                    break;
                }
            }
            '}' => depth -= 1,
            _ => {}
        }
    }
    heads
}

/// Top-level modules that the file names, each with the offset where it does.
fn top_level_uses<'a>(path: &str, code: &'a str) -> Vec<(usize, &'a str)> {
    let mut uses = Vec::new();
    for at in words(code, "crate") {
        if let Some(rest) = code[at + 5..].strip_prefix("::") {
            uses.extend(heads(rest).into_iter().map(|head| (at, head)));
        }
    }
    // `super::super::x` reaches the top level from a file two modules deep.
    let inner = path.trim_start_matches("src/").trim_end_matches(".rs").trim_end_matches("/mod");
    let climb = "super::".repeat(inner.split('/').count());
    let own_tests = tests_from(code);
    for (at, _) in code[..own_tests].match_indices(&climb) {
        let before = code[..at].chars().next_back();
        let rest = &code[at + climb.len()..];
        if !before.is_some_and(|c| is_name(c) || c == ':') && !rest.starts_with("super") {
            uses.extend(heads(rest).into_iter().map(|head| (at, head)));
        }
    }
    uses
}

fn line_of(code: &str, at: usize) -> usize {
    code[..at].matches('\n').count() + 1
}

/// Everything that is wrong with one Rust file; `path` is relative to the package.
fn check(path: &str, text: &str) -> Vec<String> {
    let mut faults = Vec::new();
    if let Some(at) = text.find(|c: char| !c.is_ascii()) {
        faults.push(format!("{path}:{}: not ASCII", line_of(text, at)));
    }
    let code = blanked(text);
    for (at, _) in code.match_indices("#[allow").chain(code.match_indices("#![allow")) {
        faults.push(format!("{path}:{}: allow, where expect with a reason is wanted", line_of(&code, at)));
    }
    for name in FORBIDDEN_MACROS {
        let name = name.trim_end_matches('!');
        for at in words(&code, name).filter(|at| code[at + name.len()..].starts_with('!')) {
            faults.push(format!("{path}:{}: {name}!", line_of(&code, at)));
        }
    }
    if path.starts_with("src/") {
        check_library(path, &code, &mut faults);
    }
    faults
}

fn check_library(path: &str, code: &str, faults: &mut Vec<String>) {
    let own_tests =
        if path.ends_with("/tests.rs") || path.contains("/tests/") { 0 } else { tests_from(code) };
    let lines = code[..own_tests].matches('\n').count();
    let cap = LINES_EXCEPTIONS.iter().find(|(file, _)| *file == path).map_or(LINES_MAX, |(_, cap)| *cap);
    if lines > cap {
        faults.push(format!("{path}: {lines} lines, at most {cap} wanted"));
    }
    if !UNSAFE_ALLOWED.iter().any(|dir| path.starts_with(dir)) {
        for at in words(code, "unsafe") {
            faults.push(format!("{path}:{}: unsafe outside {UNSAFE_ALLOWED:?}", line_of(code, at)));
        }
    }
    let module = path["src/".len()..].split(['/', '.']).next().unwrap_or("");
    let Some(own) = floor(module) else {
        faults.push(format!("{path}: module {module} has no floor"));
        return;
    };
    if module != "bin" && own < 6 {
        for (at, used) in top_level_uses(path, code) {
            let allowed =
                used == module || ROOT_MACROS.contains(&used) || floor(used).is_some_and(|floor| floor < own);
            if !allowed {
                faults.push(format!("{path}:{}: floor {own} uses crate::{used}", line_of(code, at)));
            }
        }
    }
    if own <= PURE_FLOOR_MAX && path != CONTAINERS {
        for name in IMPURE {
            for at in words(&code[..own_tests], name) {
                faults.push(format!("{path}:{}: {name} on a pure floor", line_of(code, at)));
            }
        }
    }
}

fn sources(dir: &Path, extensions: &[&str], found: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for entry in entries.map(|entry| entry.expect("a directory can be listed").path()) {
        let extension = entry.extension().and_then(|e| e.to_str()).unwrap_or("");
        if entry.is_dir() {
            sources(&entry, extensions, found);
        } else if extensions.contains(&extension) {
            found.push(entry);
        }
    }
}

#[test]
fn the_house_is_tidy() {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = vec![];
    ROOTS.iter().for_each(|root| sources(&package.join(root), &["rs", "cu", "cuh", "h"], &mut files));
    files.extend(Some(package.join("build.rs")).filter(|p| p.exists()));
    files.sort();
    assert!(files.len() > 10, "only {} sources found", files.len());
    let mut faults = Vec::new();
    for file in files {
        let text = fs::read_to_string(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        let path = file.strip_prefix(package).expect("below the package").display().to_string();
        if path.ends_with(".rs") {
            faults.extend(check(&path, &text));
        } else if !text.is_ascii() {
            faults.push(format!("{path}: not ASCII"));
        }
    }
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
}

#[test]
fn planted_faults_are_found() {
    let long = "//\n".repeat(1_201);
    let planted: &[(&str, &str, &str)] = &[
        ("src/tree/walk.rs", "use crate::tiers::Core;", "floor 2 uses crate::tiers"),
        ("src/tree/walk.rs", "fn f() { crate::engine::x() }", "floor 2 uses crate::engine"),
        ("src/key/mod.rs", "use crate::{base::Time, pool::{Page, x}};", "floor 1 uses crate::pool"),
        ("src/pd/wire.rs", "use super::super::tiers::Core;", "floor 3 uses crate::tiers"),
        ("src/tree/a/b.rs", "use super::super::super::backend::x;", "floor 2 uses crate::backend"),
        ("src/base/mod.rs", "use crate::PrefixCache;", "floor 0 uses crate::PrefixCache"),
        ("src/pd/a.rs", "#[cfg(test)]\nmod tests {\nuse crate::sim::World; }", "floor 3 uses crate::sim"),
        ("src/attic/mod.rs", "", "module attic has no floor"),
        ("src/tree/a.rs", "let t = std::time::Instant::now();", "Instant on a pure floor"),
        ("src/tiers/a.rs", "use std::collections::{BTreeMap, HashMap};", "HashMap on a pure floor"),
        ("src/key/a.rs", "std::thread::spawn(f);", "std::thread on a pure floor"),
        ("src/pool/a.rs", "let x = rand::random();", "rand on a pure floor"),
        ("src/pd/a.rs", "std::sync::Mutex::new(1);", "Mutex on a pure floor"),
        ("src/pd/a.rs", "std::net::TcpStream::connect(a);", "std::net on a pure floor"),
        ("src/tree/a.rs", &long, "1201 lines, at most 1200"),
        ("src/engine/a.rs", "unsafe { f() }", "unsafe outside"),
        ("src/engine/a.rs", "// caf\u{e9}", "not ASCII"),
        ("tests/a.rs", "#[allow(dead_code)]", "allow, where expect"),
        ("src/lib.rs", "#![allow(dead_code)]", "allow, where expect"),
        ("benches/a.rs", "todo!()", "todo!"),
        ("src/engine/a.rs", "dbg!(x);", "dbg!"),
        ("examples/a.rs", "unimplemented!()", "unimplemented!"),
    ];
    for (path, text, expected) in planted {
        let faults = check(path, text);
        assert!(
            faults.iter().any(|f| f.contains(expected)),
            "{path}: {expected} was not found, but {faults:?}"
        );
    }
}

#[test]
fn what_is_fine_passes() {
    let fine: &[(&str, &str)] = &[
        (
            "src/tree/walk.rs",
            "use crate::base::{PageId, Time};\nuse crate::pool::PagePool;\nuse crate::tree::node;",
        ),
        (
            "src/tree/walk.rs",
            "// Instant, HashMap, unsafe and crate::engine in prose\n/* dbg!() /* todo!() */ */",
        ),
        (
            "src/tree/walk.rs",
            "let s = \"unsafe \\\" Instant\"; let r = r#\"Mutex \" rand\"#; let b = b\"HashMap\";",
        ),
        ("src/tree/walk.rs", "fn f<'a>(x: &'a str) { let q = '\"'; let e = '\\''; let u = '\\u{41}'; }"),
        ("src/tree/walk.rs", "let operand = InstantRate; invariant!(a, \"b\"); crate::invariant!(a, \"c\");"),
        ("src/tree/walk.rs", "fn f() {}\n#[cfg(test)]\nmod tests {\nuse std::collections::HashMap;\n}"),
        ("src/base/containers.rs", "use std::collections::{HashMap, HashSet};"),
        ("src/backend/region.rs", "unsafe { f() }\nuse std::sync::Mutex;"),
        ("src/engine/cache.rs", "use crate::tiers::Core;\nuse std::time::Instant;"),
        ("src/pd/wire.rs", "use super::plan::Plan;"),
        ("src/bin/sapwood/replay/mod.rs", "use crate::replay::x;"),
        ("tests/a.rs", "unsafe impl Send for X {}"),
    ];
    for (path, text) in fine {
        assert_eq!(check(path, text), Vec::<String>::new(), "{path}: {text}");
    }
}

#[test]
fn a_module_declared_for_tests_in_another_file_hides_nothing() {
    let text = "fn f() {}\n#[cfg(test)]\nmod tests;\nfn g() { let _ = std::time::Instant::now(); }\n";
    assert_eq!(check("src/tree/a.rs", text).len(), 1);
}

/// What stands between back quotes, fenced blocks left out, each with its line.
fn quoted_names(page: &str) -> Vec<(usize, &str)> {
    let (mut names, mut fenced) = (Vec::new(), false);
    for (number, line) in (1..).zip(page.lines()) {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if !fenced {
            names.extend(line.split('`').skip(1).step_by(2).map(|name| (number, name)));
        }
    }
    names
}

/// What a page names and the package does not have: files, directories, and functions written `file::function`.
fn missing(path: &str, page: &str, package: &Path) -> Vec<String> {
    // What is named behind this heading belongs to others.
    let own = page.find("\n## Sources\n").unwrap_or(page.len());
    let beside = Path::new(path).parent().unwrap_or(Path::new(""));
    let places = [Path::new(""), Path::new("src"), Path::new("tests"), Path::new("docs"), beside];
    let find = |name: &str| places.iter().map(|p| package.join(p).join(name)).find(|file| file.exists());
    let is_path = |name: &str| {
        let known = ROOTS.iter().chain(&["docs", ".ci", "fuzz", "peers", "bindings"]);
        let first = name.split('/').next().unwrap_or("");
        name.chars().all(|c| is_name(c) || "/.-".contains(c))
            && name.contains('/')
            && (name.contains(".rs") || known.into_iter().any(|root| *root == first))
            && (package.join(first).exists() || ![".ci", "fuzz"].contains(&first))
    };
    let mut faults = Vec::new();
    for (line, name) in quoted_names(&page[..own]) {
        let (file, function) = name.split_once(".rs::").map_or((name, None), |(f, g)| (f, Some(g)));
        let file = if function.is_some() { format!("{file}.rs") } else { file.to_owned() };
        if !is_path(&file) {
            continue;
        }
        match (find(&file), function) {
            (None, _) => faults.push(format!("{path}:{line}: there is no {file}")),
            (Some(found), Some(function)) => {
                let text = fs::read_to_string(&found).unwrap_or_default();
                let there = words(&text, function).any(|at| text[..at].ends_with("fn "));
                if !there {
                    faults.push(format!("{path}:{line}: {file} has no function {function}"));
                }
            }
            (Some(_), None) => {}
        }
    }
    for (at, _) in page[..own].match_indices("](") {
        let target = page[at + 2..].split([')', '#']).next().unwrap_or("");
        if !target.is_empty() && !target.contains("://") && !package.join(beside).join(target).exists() {
            faults.push(format!("{path}:{}: the link leads nowhere: {target}", line_of(page, at)));
        }
    }
    faults
}

#[test]
fn what_the_pages_name_is_there() {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = vec![package.join("README.md"), package.join("CHANGELOG.md")];
    for dir in ["docs", "benches", "kernels", "fuzz", "bindings"] {
        sources(&package.join(dir), &["md"], &mut files);
    }
    files.sort();
    let mut faults = Vec::new();
    for file in files {
        let page = fs::read_to_string(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        let path = file.strip_prefix(package).expect("below the package").display().to_string();
        faults.extend(missing(&path, &page, package));
    }
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
}

/// Names of the rules that `sanity` looks at: literals of small letters and hyphens.
fn rules(text: &str) -> Vec<&str> {
    let is_rule = |name: &&str| {
        let fits = |c: char| c == '-' || c.is_ascii_lowercase();
        name.contains('-') && name.chars().all(fits) && !name.starts_with('-')
    };
    text.split('"').skip(1).step_by(2).filter(is_rule).collect()
}

#[test]
fn every_rule_of_sanity_has_a_promise_and_the_other_way_round() {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |name: &str| fs::read_to_string(package.join(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
    let files = ["src/tree/sanity.rs", "src/tree/component/flow.rs", "src/tiers/core.rs"].map(read);
    let page = read("docs/INVARIANTS.md");
    let known: Vec<&str> = files.iter().flat_map(|text| rules(text)).collect();
    assert!(known.len() > 20, "{known:?}");
    let unnamed: Vec<_> = known.iter().filter(|rule| !page.contains(&format!("`{rule}`"))).collect();
    assert!(unnamed.is_empty(), "rules that docs/INVARIANTS.md does not name: {unnamed:?}");
    let named = quoted_names(&page);
    let quoted = format!("\"{}\"", named.iter().map(|(_, name)| *name).collect::<Vec<_>>().join("\"\""));
    let gone: Vec<_> = rules(&quoted).into_iter().filter(|rule| !known.contains(rule)).collect();
    assert!(gone.is_empty(), "docs/INVARIANTS.md names rules that are gone: {gone:?}");
}

#[test]
fn what_a_page_names_wrongly_is_found() {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let wrong = [
        ("see `src/nowhere.rs`", "there is no src/nowhere.rs"),
        ("`tidy.rs` and `tests/tidy.rs::what_is_not_there`", "has no function what_is_not_there"),
        ("`tests/nowhere/`", "there is no tests/nowhere/"),
        ("[a](nowhere.md)", "the link leads nowhere: nowhere.md"),
    ];
    for (page, expected) in wrong {
        let faults = missing("docs/a.md", page, package);
        assert!(
            faults.iter().any(|f| f.contains(expected)),
            "{page}: {expected} was not found, but {faults:?}"
        );
    }
    let fine = "`tests/tidy.rs::missing`, `a/b`, `Core::sanity`, [x](https://example.org/y.md)\n## Sources\n`src/x.rs`\n";
    assert_eq!(missing("docs/a.md", fine, package), Vec::<String>::new());
}
