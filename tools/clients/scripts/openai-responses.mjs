// set-up
import OpenAI from 'openai';

const { BASE_URL, API_KEY, MODEL } = process.env;
const client = new OpenAI({ baseURL: `${BASE_URL}/v1`, apiKey: API_KEY, maxRetries: 0 });
// end
import { readFileSync } from 'node:fs';

const cancel = process.argv[2] === 'cancel';
const parameters = { type: 'object', properties: { path: { type: 'string' } }, required: ['path'], additionalProperties: false };
const tools = [{ type: 'function', name: 'read_file', description: 'Reads a file.', parameters, strict: true }];
let input = [{ role: 'user', content: process.env.PROMPT }];
let previous;
for (;;) {
  // The server keeps what was said: each turn sends only what is new.
  const stream = client.responses.stream({ model: MODEL, input, tools, previous_response_id: previous });
  let deltas = 0;
  stream.on('response.output_text.delta', (event) => {
    process.stdout.write(event.delta);
    if (cancel && ++deltas === 5) stream.abort();
  });
  let response;
  try {
    response = await stream.finalResponse();
  } catch (error) {
    if (cancel && error instanceof OpenAI.APIUserAbortError) break;
    throw error;
  }
  const calls = response.output.filter((item) => item.type === 'function_call');
  if (!calls.length) break;
  previous = response.id;
  input = calls.map((call) => ({
    type: 'function_call_output', call_id: call.call_id, output: readFileSync(JSON.parse(call.arguments).path, 'utf8'),
  }));
}
