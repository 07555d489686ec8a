// Three turns with the OpenAI SDK: blocking, streamed after `previous_response_id`, and with the history given back.
// usage: node openai.mjs PACKAGE BASE_URL; prints what came back, as JSON.
const [name, baseURL] = process.argv.slice(2);
const { default: OpenAI } = await import(name);

const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0, timeout: 60_000 });
const model = "scripted";
const tools = [{ type: "code_interpreter", container: { type: "auto" } }];

const first = await client.responses.create({ model, input: "Square", tools });
const cited = first.output.at(-1).content[0].annotations[0];
const file = await client.containers.files.content.retrieve(cited.file_id, { container_id: cited.container_id });

let code = "";
const events = [];
const stream = client.responses.stream({ model, input: "Add", tools, previous_response_id: first.id });
for await (const event of stream) {
  if (event.type === "response.code_interpreter_call_code.delta") code += event.delta;
  events.push(event.type);
}
const second = await stream.finalResponse();

const history = [{ role: "user", content: "Square" }, ...first.output, { role: "user", content: "Add" }];
const third = await client.responses.create({ model, input: history, tools, store: false });

const ran = (response) => response.output.find((item) => item.type === "code_interpreter_call");
const containers = [first, second, third].map((response) => ran(response).container_id);
const texts = [first, second, third].map((response) => response.output_text);
console.log(JSON.stringify({ texts, code, containers, file: await file.text(), last: events.at(-1) }));
