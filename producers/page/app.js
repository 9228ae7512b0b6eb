// The page: a key, the list, one job beside it. The address holds the view (`#job=…`), the tab holds the key.

import { call, forgetKey, hasKey, Problem, setKey, takeKeyFromAddress } from "./api.js";
import { find, setText } from "./dom.js";
import { JobPanel } from "./job.js";
import { JobList } from "./jobs.js";
import { clock, say } from "./text.js";

let list = null;
let panel = null;
let heardAt = null;
let lostAt = null;

function heard() {
  heardAt = new Date();
  lostAt = null;
  find("banner").hidden = true;
  setText(find("as-of"), say("asOf", { time: clock(heardAt) }));
}

function lost(error) {
  if (error instanceof Problem && error.status === 401) return door(say("keyWrong"));
  lostAt = lostAt || heardAt || new Date();
  setText(find("banner"), say("lost", { time: clock(lostAt) }));
  find("banner").hidden = false;
  return undefined;
}

function door(message = "") {
  forgetKey();
  leave();
  setText(find("door-title"), say("keyTitle"));
  setText(find("door-hint"), say("keyHint"));
  setText(find("key-label"), say("keyLabel"));
  setText(find("enter"), say("enter"));
  setText(find("door-error"), message);
  find("banner").hidden = true;
  find("main").hidden = true;
  find("forget").hidden = true;
  find("door").hidden = false;
  find("key").focus();
}

function leave() {
  list?.stop();
  panel?.stop();
  panel = null;
}

function enter() {
  find("door").hidden = true;
  find("main").hidden = false;
  find("forget").hidden = false;
  setText(find("forget"), say("forget"));
  list = list || new JobList({ heard, lost, open: (uid) => { location.hash = `job=${uid}`; }, changed: (view) => panel?.take(view) });
  list.start();
  route();
}

function route() {
  const uid = new URLSearchParams(location.hash.slice(1)).get("job");
  panel?.stop();
  panel = null;
  list?.choose(uid);
  find("job").hidden = !uid;
  find("main").classList.toggle("with-job", Boolean(uid));
  if (!uid || !/^[0-9a-f-]{36}$/.test(uid)) return;
  panel = new JobPanel(uid, { close: () => { location.hash = ""; } });
  panel.start();
}

find("door").addEventListener("submit", async (event) => {
  event.preventDefault();
  const key = find("key").value.trim();
  find("key").value = "";
  setKey(key);
  try {
    await call("/v1/jobs?limit=1");
    enter();
  } catch (error) {
    door(error instanceof Problem && error.status === 401 ? say("keyWrong") : say("failed", { text: error.message }));
  }
});
find("forget").addEventListener("click", () => door());
addEventListener("hashchange", () => {
  takeKeyFromAddress();
  if (!hasKey()) return;
  if (find("main").hidden) enter();
  else route();
});
// A hidden page costs nobody anything; when it is seen again it reads anew.
document.addEventListener("visibilitychange", () => {
  if (!hasKey() || find("main").hidden) return;
  if (document.hidden) leave();
  else enter();
});

takeKeyFromAddress();
if (hasKey()) enter();
else door();
