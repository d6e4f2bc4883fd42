//! `quantkit run`: recipes.

use std::fs;

use serde_json::{Value, json};
use yaml_rust2::{Yaml, YamlLoader};

use crate::support::command::std_command;
use crate::support::repository;
use crate::support::scene::{Scene, copy_folder};

const RECIPE: &str = r#"
out = "artifacts"

[source]
model = "model"

[[artifact]]
name = "w4"
method = "gptq"
bits = 4
group_size = 32
calib = "calib.txt"
nsamples = 4
seqlen = 32

[[artifact]]
name = "w8"
method = "rtn"
bits = 8
group_size = 32
skip = ['layers\.0\.mlp']

[[artifact]]
name = "q4"
method = "gguf"
type = "Q4_0"

[validate]
texts = ["eval.txt"]
window = 32
windows = 2

[thresholds]
max_kl = 5.0
max_ppl_increase = "500%"
"#;

fn scene(recipe: &str) -> Scene {
    let scene = Scene::demo();
    copy_folder(&repository("calib/demo/target"), &scene.model());
    scene.write("quantkit.toml", recipe);
    scene
}

#[track_caller]
fn run(scene: &Scene, args: &[&str], code: i32) -> Value {
    scene.run(&[&["run", "--json"], args].concat()).ended(code).json()
}

/// `name: state` of each artifact.
fn states(found: &Value) -> Vec<String> {
    let all = found["artifacts"].as_array().unwrap().iter();
    all.map(|a| format!("{}: {}", a["name"].as_str().unwrap(), a["state"].as_str().unwrap())).collect()
}

#[test]
fn made_measured_and_left_alone() {
    let scene = scene(RECIPE);
    let before = scene.listing();
    let plan = run(&scene, &["--dry-run"], 0);
    assert_eq!(scene.listing(), before, "a dry run wrote something");
    assert_eq!(states(&plan), ["w4: new", "w8: new", "q4: new"]);
    let estimate = &plan["artifacts"][0]["estimate"];
    assert!(estimate["memory_bytes"].as_u64().unwrap() > 0 && estimate["seconds"].as_f64().unwrap() > 0.0);
    assert!(estimate["seconds_basis"].as_str().unwrap().starts_with("rule of thumb"), "{estimate}");
    // Rounding alone has the weights of a stage at hand in f32, some times over: gate and up at once.
    let rounding = plan["artifacts"][1]["estimate"]["memory_bytes"].as_u64().unwrap();
    assert!((2 * 256 * 768 * 8..2 * 256 * 768 * 20).contains(&rounding), "{rounding}");

    let made = run(&scene, &[], 0);
    assert_eq!(
        (&made["passed"], states(&made)),
        (&json!(true), vec!["w4: new".into(), "w8: new".into(), "q4: new".into()])
    );
    for artifact in made["artifacts"].as_array().unwrap() {
        let validation = &artifact["validation"];
        assert_eq!((&validation["passed"], &validation["measured_now"]), (&json!(true), &json!(true)), "{artifact}");
        let report = scene.json(validation["report"].as_str().unwrap());
        assert_eq!(report["schema"], "quantkit-report/1");
        let page = scene.path(validation["report"].as_str().unwrap());
        assert!(["html", "md", "xml"].iter().all(|end| page.with_extension(end).is_file()));
        assert!(report["divergence"][0]["figures"]["kl"]["mean"].as_f64().unwrap() > 0.0);
    }
    // The plan said what was written, but for the headers.
    for (before, after) in plan["artifacts"].as_array().unwrap().iter().zip(made["artifacts"].as_array().unwrap()) {
        let (planned, there) = (before["estimate"]["output_bytes"].as_u64().unwrap(), after["bytes"].as_u64().unwrap());
        assert!(there >= planned && there - planned < 300_000, "{planned} {there}");
    }
    // A command's own run writes the same.
    let args = ["rtn", "model", "--bits", "8", "--group-size", "32", "--skip", "layers\\.0\\.mlp", "-o", "by-hand"];
    scene.run(&[&args[..], &["--no-eval"]].concat()).ok();
    assert_eq!(scene.read("by-hand/quantkit.json"), scene.read("artifacts/w8/quantkit.json"));

    let (listing, weights) = (scene.listing(), scene.read("artifacts/w4/model.safetensors"));
    let again = run(&scene, &[], 0);
    assert_eq!(states(&again), ["w4: up_to_date", "w8: up_to_date", "q4: up_to_date"]);
    assert!(again["artifacts"].as_array().unwrap().iter().all(|a| a["validation"]["measured_now"] == false));
    assert_eq!(scene.listing(), listing);

    // Options of one.
    scene.write("quantkit.toml", RECIPE.replace("nsamples = 4", "nsamples = 3\nsampling = \"in-order\""));
    let plan = run(&scene, &["--dry-run"], 0);
    assert_eq!(states(&plan), ["w4: changed", "w8: up_to_date", "q4: up_to_date"]);
    let estimate = &plan["artifacts"][0]["estimate"];
    assert!(estimate["seconds_basis"].as_str().unwrap().starts_with("`w4` took"), "{estimate}");
    let changed = run(&scene, &[], 0);
    assert_eq!(states(&changed), ["w4: changed", "w8: up_to_date", "q4: up_to_date"]);
    assert_ne!(scene.read("artifacts/w4/model.safetensors"), weights);
    assert_eq!(changed["artifacts"][0]["validation"]["measured_now"], true);
    assert_eq!(changed["artifacts"][1]["validation"]["measured_now"], false);
}

#[test]
fn what_has_changed_is_told() {
    let scene = scene(RECIPE.replace("[validate]", "[other]").split("[other]").next().unwrap());
    let first = run(&scene, &[], 0);
    assert!(first["artifacts"].as_array().unwrap().iter().all(|a| a["validation"].is_null()));
    let why = |name: &str, found: &Value| -> String {
        let all = found["artifacts"].as_array().unwrap();
        let one = all.iter().find(|a| a["name"] == name).unwrap();
        format!("{} {}", one["state"].as_str().unwrap(), one["why"].as_str().unwrap_or_default())
    };
    // Another text under the same name.
    let mut text = scene.read("calib.txt");
    text.reverse();
    scene.write("calib.txt", text.to_ascii_lowercase());
    let plan = run(&scene, &["--dry-run"], 0);
    assert_eq!(why("w4", &plan), "changed the file of `calib` was another");
    assert_eq!(why("w8", &plan), "up_to_date ");
    // Damage of a weight file, of the manifest, and of a whole file.
    let mut weights = scene.read("artifacts/w8/model.safetensors");
    *weights.last_mut().unwrap() ^= 1;
    scene.write("artifacts/w8/model.safetensors", &weights);
    fs::remove_file(scene.path("artifacts/w4/quantkit.json")).unwrap();
    scene.write("artifacts/q4.gguf", "nothing");
    scene.run(&["run", "--only", "w8", "--only", "q4"]).ok().says(&["w8: damaged (`w8/model.safetensors` has SHA-256"]);
    let plan = run(&scene, &["--dry-run"], 0);
    assert_eq!((why("w8", &plan), why("q4", &plan)), ("up_to_date ".into(), "up_to_date ".into()));
    scene.write("artifacts/w8/config.json", "{}");
    fs::remove_file(scene.path("artifacts/w8/quantkit.json")).unwrap();
    run(&scene, &["--only", "w8"], 0);
    assert!(scene.path("artifacts/w8/quantkit.json").exists());
    // What others put into the folder of an artifact is no part of it, and stays.
    scene.write("artifacts/w8/README.md", "card");
    assert_eq!(why("w8", &run(&scene, &["--dry-run"], 0)), "up_to_date ");
    fs::remove_file(scene.path("artifacts/w8/quantkit.json")).unwrap();
    run(&scene, &["--only", "w8"], 0);
    assert_eq!(scene.read("artifacts/w8/README.md"), b"card");
    scene.write("artifacts/w8/README.md", "another");
    assert_eq!(why("w8", &run(&scene, &["--dry-run"], 0)), "up_to_date ");
    // A side file of the model goes into every artifact.
    scene.write("model/chat_template.jinja", "{{ messages }}");
    let plan = run(&scene, &["--dry-run", "--only", "w8"], 0);
    assert_eq!(why("w8", &plan), "changed `chat_template.jinja` of the model was another");
    assert_eq!(plan["artifacts"].as_array().unwrap().len(), 1);
}

/// A limit of one does not stop the others; limits alone do not measure anew.
#[test]
fn gates() {
    let scene = scene(&RECIPE.replace("type = \"Q4_0\"\n", "type = \"Q4_0\"\n[artifact.thresholds]\nmax_kl = 0.0\n"));
    let summary = scene.path("summary.md");
    let mut command = std_command(scene.root(), &["run", "--json"]);
    let output = command.env("GITHUB_STEP_SUMMARY", &summary).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let (stderr, found): (_, Value) =
        (String::from_utf8(output.stderr).unwrap(), serde_json::from_slice(&output.stdout).unwrap());
    assert!(stderr.contains("q4: ") && !stderr.contains("w8: divergence"), "{stderr}");
    let passed: Vec<&Value> =
        found["artifacts"].as_array().unwrap().iter().map(|a| &a["validation"]["passed"]).collect();
    assert_eq!((passed, &found["passed"]), (vec![&json!(true), &json!(true), &json!(false)], &json!(false)));
    let table = fs::read_to_string(summary).unwrap();
    assert!(table.contains("| w4 | ") && table.contains("| passed |"), "{table}");
    scene.write("quantkit.toml", RECIPE);
    let found = run(&scene, &[], 0);
    assert!(found["artifacts"].as_array().unwrap().iter().all(|a| a["validation"]["measured_now"] == false));
}

#[test]
fn bad_recipes() {
    let scene = scene(RECIPE);
    let refused = |text: &str, parts: &[&str]| {
        scene.write("bad.toml", text);
        scene.run(&["run", "bad.toml", "--dry-run"]).ended(2).says(parts);
    };
    let changed = |from: &str, to: &str| {
        assert!(RECIPE.contains(from));
        RECIPE.replacen(from, to, 1)
    };
    refused("", &["`bad.toml`: there is no `[[artifact]]`"]);
    refused("out = ", &["`bad.toml`, line 1"]);
    refused(&changed("out =", "outs ="), &["line 2: `outs` is no key here; is `out` meant?"]);
    refused(&changed("model = \"model\"", "models = \"model\""), &["line 5: `models`", "is `model` meant?"]);
    refused(&changed("bits = 4", "bits = 5"), &["line 10:", "`bits`", "bits are 2, 3, 4 or 8"]);
    refused(&changed("group_size = 32", "groupsize = 32"), &["line 11:", "no option of `gptq`", "`group_size` meant"]);
    refused(&changed("method = \"gptq\"", "method = \"gtpq\""), &["line 9:", "is `gptq` meant?"]);
    refused(&changed("calib = \"calib.txt\"", "calib = \"none.txt\""), &["line 12:", "`none.txt` is no file"]);
    refused(&changed("nsamples = 4", "no_eval = true"), &["line 13:", "`[validate]` says what is measured"]);
    refused(&changed("nsamples = 4", "desc_act = 1"), &["line 13:", "takes true or false"]);
    refused(&changed("seqlen = 32", "desc_act = true\norder = \"natural\""), &["cannot be used with"]);
    refused(&changed("name = \"w8\"", "name = \"w4\""), &["two artifacts are called `w4`"]);
    refused(&changed("name = \"w8\"", "name = \"../w8\""), &["line 17:", "is no name for an artifact"]);
    refused(&changed("name = \"w8\"\n", ""), &["line 16:", "has no `name`"]);
    refused(&changed("windows = 2", "widnows = 2"), &["is `windows` meant?"]);
    refused(&changed("window = 32", "convention = \"mine\""), &["[validate]", "gptq, llamacpp, lmeval"]);
    refused(&changed("eval.txt", "evil.txt"), &["`evil.txt` is no file"]);
    refused(&changed("max_kl = 5.0", "max_lk = 5.0"), &["is `max_kl` meant?"]);
    refused(&changed("\"500%\"", "0.5"), &["line", "string"]);
    refused(&changed("\"500%\"", "\"0.5\""), &["write a percentage"]);
    refused(&changed("window = 32", "window = 0"), &["[validate]", "--window"]);
    refused(&changed("window = 32", "draft = \"nosuch\""), &["`draft`: `nosuch` is no artifact of the recipe"]);
    refused(&changed("max_kl = 5.0", "consumers = [\"vlm\"]"), &["line", "`vlm` is no known consumer"]);
    refused(&changed("max_kl = 5.0", "max_kl_increase = \"1%\""), &["line", "needs a baseline"]);
    refused(&changed("name = \"w8\"", "name = \"q4.gguf\""), &["`q4.gguf` and `q4` would both be written to"]);
    // What only the model tells is found before any work as well.
    refused(&changed("bits = 8\ngroup_size = 32", "bits = 8\ngroup_size = 31"), &["artifact `w8`", "group size 31"]);
    scene.run(&["run", "--only", "w9"]).ended(2).says(&["`w9` is no artifact here"]);
    scene.run(&["run", "none.toml"]).ended(2).says(&["cannot read the recipe `none.toml`"]);
    assert!(!scene.path("artifacts").exists());
    // Nothing of the user's is taken for an artifact.
    fs::create_dir_all(scene.path("artifacts/w8")).unwrap();
    scene.write("artifacts/w8/precious.txt", "mine");
    scene.run(&["run"]).ended(2).says(&["no record says that this recipe made it"]);
    assert_eq!(scene.read("artifacts/w8/precious.txt"), b"mine");
}

/// The recipe and the workflow in README are such as they say.
#[test]
fn readme_s_recipe_and_workflow() {
    let readme = fs::read_to_string(repository("README.md")).unwrap();
    let block = |kind: &str| {
        let (_, rest) = readme.split_once(&format!("```{kind}\n")).unwrap();
        rest.split_once("\n```").unwrap().0.to_string()
    };
    let scene = Scene::demo();
    scene.write("quantkit.toml", block("toml"));
    scene.write("domain.txt", scene.read("calib.txt"));
    scene.write("wiki.test.txt", scene.read("eval.txt"));
    let recipe = fs::read_to_string(scene.path("quantkit.toml")).unwrap();
    // The demo checkpoint for the model that the recipe names.
    scene.write("quantkit.toml", recipe.lines().filter(|l| !l.starts_with("model =")).collect::<Vec<_>>().join("\n"));
    let plan = run(&scene, &["--dry-run"], 0);
    assert!(plan["artifacts"].as_array().unwrap().len() >= 2);

    let workflow = &YamlLoader::load_from_str(&block("yaml")).unwrap()[0];
    let steps = workflow["jobs"]["artifacts"]["steps"].as_vec().unwrap();
    let commands: Vec<&str> = steps.iter().filter_map(|step| step["run"].as_str()?.strip_prefix("quantkit ")).collect();
    assert_eq!(commands, ["run quantkit.toml --dry-run", "run quantkit.toml"]);
    for command in commands {
        scene.run(&[command.split(' ').collect(), vec!["--help"]].concat()).ok();
    }
    let using = |action: &str| {
        let uses = |step: &&Yaml| step["uses"].as_str().is_some_and(|uses| uses.starts_with(action));
        steps.iter().find(uses).unwrap_or_else(|| panic!("no {action}"))
    };
    let out = recipe.lines().find_map(|line| line.strip_prefix("out = ")).unwrap().trim_matches('"');
    // The usual action saves only where all steps passed: a failed gate would throw away what was made.
    let save = using("actions/cache/save@");
    for cache in [using("actions/cache/restore@"), save] {
        assert_eq!(cache["with"]["path"].as_str(), Some(out));
        assert_eq!(cache["with"]["key"].as_str(), save["with"]["key"].as_str());
    }
    assert_eq!(save["if"].as_str(), Some("always()"));
    let upload = using("actions/upload-artifact@");
    assert_eq!(upload["with"]["path"].as_str(), Some(&*format!("{out}/reports")));
    assert_eq!(upload["if"].as_str(), Some("always()"));
}
