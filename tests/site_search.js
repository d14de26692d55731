// Ask the built site as its search box does: node site_search.js SITE QUERY…; prints {query: [location, …]}, best first.
// The worker of the theme is loaded as a browser loads it; it gets the index of the site and answers by messages.
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const [site, ...queries] = process.argv.slice(2);
const folder = path.join(site, "assets/javascripts/workers");
const worker = fs.readdirSync(folder).find((name) => /^search\..*\.js$/.test(name));
const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf8"));
const listeners = [];
const answers = [];

globalThis.self = globalThis;
globalThis.location = new URL("http://site.test/");
globalThis.importScripts = () => {};
globalThis.addEventListener = (kind, listener) => kind === "message" && listeners.push(listener);
globalThis.postMessage = (message) => answers.push(message);
vm.runInThisContext(fs.readFileSync(path.join(folder, worker), "utf8"));

async function send(type, data) {
  const before = answers.length;
  for (const listener of listeners) await listener({ data: { type, data } });
  for (let tries = 0; answers.length === before && tries < 1000; tries++) await new Promise((done) => setTimeout(done, 5));
  if (answers.length === before) throw new Error(`no answer to ${JSON.stringify(data).slice(0, 80)}`);
  return answers[answers.length - 1].data;
}

(async () => {
  await send(0, { ...index, options: { suggest: false } });
  const found = {};
  for (const query of queries) found[query] = (await send(2, query)).items.map((item) => item[0].location);
  console.log(JSON.stringify(found));
})();
