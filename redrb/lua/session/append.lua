-- Store a turn of a session, unless a turn answers the same request already.
-- KEYS[1] stream
-- ARGV    the call `AppendTurn` of redrb/gateway/calls.py; the encoded turn
-- Returns its reply; behind it the turn that was stored first. Repeated, it stores no second turn.
--@include task sessions permissions

check_permissions(KEYS[1])
begin_writing()
local ask = cmsgpack.unpack(ARGV[1])
local session, request = key('session', ask.session), 'request ' .. ask.request
local head = head_of(session)
if not head then
  return {cmsgpack.pack('unknown')}
end
local first = redis.call('HGET', session, request)
if first then
  renew(session, head, ask.ttl_ms)
  return {cmsgpack.pack('known'), redis.call('HGET', session, first)}
elseif redis.call('HEXISTS', session, 'over') == 1 then
  return {cmsgpack.pack('over')}
end
local child, before = string.format('child %d', ask.parent), string.format('path %d', ask.parent)
local known, size = numbers(session, 'turns', 'bytes', 'samples', 'tokens', before), #ARGV[2]
local path = known[5] + ask.tokens
local begins = ask.parent < 0 or redis.call('HEXISTS', session, child) == 1 -- one more sample
if begins and known[1] > 0 and not ask.may_branch then
  return {cmsgpack.pack('edited')}
end
local samples, tokens = begins and 1 or 0, begins and path or ask.tokens
if known[1] >= ask.most_turns or known[2] + size > ask.most_bytes or
  known[3] + samples > ask.most_samples or known[4] + tokens > ask.most_tokens then
  return {cmsgpack.pack('full')}
end
local index = string.format('%d', known[1])
redis.call('HSET', session, index, ARGV[2], request, index, child, index, 'path ' .. index, path)
add(session, 'turns', 1)
add(key('parts'), 'turns', 1)
add(session, 'bytes', size)
add(session, 'samples', samples)
add(session, 'tokens', tokens)
renew(session, head, ask.ttl_ms)
return {cmsgpack.pack('stored')}
