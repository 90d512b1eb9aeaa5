//! What comes in from outside as names: token rows, namespaces, page hashes, and the encoded identities and envelopes
//! that stores hand back.
#![no_main]

#[path = "bounded.rs"]
mod bounded;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;

use bounded::Int;
use sapwood::backend::identity::{Descriptor, StoreKey};
use sapwood::backend::store::envelope::Header;
use sapwood::base::NamespaceId;
use sapwood::key::{Key, KeyView, Namespace, Namespaces, hash_pages, tokens_from_i64};

#[derive(Arbitrary, Debug)]
struct Fields {
    adapter: Option<String>,
    salt: Option<String>,
    user_key: Option<String>,
}

#[derive(Arbitrary, Debug)]
enum Input<'a> {
    Row {
        tokens: Vec<i64>,
        page_size: Int<0, 9>,
        bigram: bool,
        cut: Int<0, 9>,
        seed: Option<[u8; 32]>,
    },
    Small {
        tokens: Vec<Int<0, 3>>,
        page_size: Int<1, 4>,
        bigram: bool,
        cut: Int<0, 9>,
        seed: Option<[u8; 32]>,
    },
    Names(Vec<Fields>),
    Descriptor(&'a [u8]),
    Envelope(&'a [u8]),
    Hex(&'a str),
}

/// Hashes of a row are those of its head, and then those of its rest behind the head.
fn row(tokens: &[u32], page_size: u32, bigram: bool, cut: u32, seed: Option<[u8; 32]>) {
    let view = if bigram { KeyView::Bigram } else { KeyView::Plain };
    let key = Key { ns: NamespaceId::DEFAULT, tokens, view };
    let pages = key.pages(page_size);
    assert!(
        page_size == 0 || pages as usize == tokens.len().saturating_sub(view.overlap()) / page_size as usize
    );
    let rest = key.from_page(cut, page_size);
    assert_eq!(rest.pages(page_size), if page_size == 0 { 0 } else { pages.saturating_sub(cut) });
    if page_size == 0 {
        return;
    }
    let (mut all, mut head, mut tail) = (Vec::new(), Vec::new(), Vec::new());
    hash_pages(key, page_size, seed, &mut all);
    assert_eq!(all.len(), pages as usize);
    let cut = cut.min(pages);
    let end = (cut * page_size) as usize + view.overlap();
    hash_pages(Key { tokens: &tokens[..end.min(tokens.len())], ..key }, page_size, seed, &mut head);
    assert_eq!(head, all[..cut as usize]);
    hash_pages(key.from_page(cut, page_size), page_size, head.last().map(|h| h.0).or(seed), &mut tail);
    assert_eq!(tail, all[cut as usize..]);
}

fn names(all: Vec<Fields>) {
    let mut table = Namespaces::new();
    let mut known: Vec<(Namespace, NamespaceId)> = Vec::new();
    for Fields { adapter, salt, user_key } in all {
        let name = Namespace { adapter, salt, user_key };
        let Ok(id) = table.intern(&name) else { continue };
        assert_eq!(table.get(id), Some(&name));
        for (other, other_id) in &known {
            assert_eq!(*other == name, *other_id == id, "{other:?} and {name:?}");
            assert_eq!(*other == name, table.seed(*other_id) == table.seed(id), "{other:?} and {name:?}");
        }
        known.push((name, id));
    }
}

fuzz_target!(|input: Input<'_>| match input {
    Input::Row { tokens, page_size, bigram, cut, seed } => {
        let mut narrow = vec![1];
        let fits = |t: &i64| (0..=i64::from(u32::MAX)).contains(t);
        match tokens_from_i64(&tokens, &mut narrow) {
            Ok(()) => {
                assert!(tokens.iter().map(|t| u32::try_from(*t).ok()).eq(narrow.iter().map(|t| Some(*t))));
                row(&narrow, page_size.0, bigram, cut.0, seed);
            }
            Err(bad) => {
                assert_eq!(tokens.iter().position(|t| !fits(t)), Some(bad.position));
                assert!(tokens[bad.position] == bad.token && narrow.is_empty());
            }
        }
    }
    Input::Small { tokens, page_size, bigram, cut, seed } => {
        let tokens: Vec<u32> = tokens.iter().map(|t| t.0).collect();
        row(&tokens, page_size.0, bigram, cut.0, seed);
    }
    Input::Names(all) => names(all),
    Input::Descriptor(bytes) => {
        if let Ok(descriptor) = Descriptor::decode(bytes) {
            let again = descriptor.encode().expect("what was decoded can be encoded");
            assert_eq!(again, bytes, "one descriptor, one encoding");
        }
    }
    Input::Envelope(bytes) => {
        if let Ok(header) = Header::decode(bytes) {
            assert_eq!(header.encode()[..], bytes[..header.encode().len()]);
        }
    }
    Input::Hex(text) => {
        if let Some(key) = StoreKey::from_hex(text) {
            assert_eq!(key.hex(), text, "one key, one spelling");
        }
    }
});
