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
local known, size = numbers(session, 'turns', 'bytes'), #ARGV[2]
if known[1] >= ask.most_turns or known[2] + size > ask.most_bytes then
  return {cmsgpack.pack('full')}
end
local index = string.format('%d', known[1])
redis.call('HSET', session, index, ARGV[2], request, index)
add(session, 'turns', 1)
add(session, 'bytes', size)
renew(session, head, ask.ttl_ms)
return {cmsgpack.pack('stored')}
