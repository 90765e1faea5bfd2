/**
 * Client of toolcrew's HTTP API. Each operation of docs/http-api.md is a function with the operation's name. The
 * folder `generated` is made by scripts/typescript_client.py.
 */
export * from './generated/index.js';
export { client } from './generated/client.gen.js';
export { createClient } from './generated/client/index.js';
