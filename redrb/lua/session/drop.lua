-- Delete a session that is not over: a reward that is repeated needs the turns. With `unless_shared` one that
-- an equal request has found stays. If the group has no other session, its right returns.
-- KEYS[1] stream
-- ARGV    the call `DropSession` of redrb/gateway/calls.py
-- Returns its reply. Repeated, it does nothing a second time.
--@include task waking sessions permissions

check_permissions(KEYS[1])
begin_writing()
local ask = cmsgpack.unpack(ARGV[1])
local session = key('session', ask.session)
local head = head_of(session)
if not head or redis.call('HEXISTS', session, 'over') == 1 or
  ask.unless_shared and redis.call('HEXISTS', session, 'shared') == 1 then
  return cmsgpack.pack('dropped')
end
redis.call('DEL', session)
redis.call('ZREM', key('sessions'), head.id)
local gathering = key('gathering', head.group)
if redis.call('EXISTS', gathering) == 0 then
  return cmsgpack.pack('dropped')
end
local dropped = redis.call('HINCRBY', gathering, 'dropped', 1)
leave(head, true)
if dropped == number(gathering, 'next') then
  local filling = key('filling', head.place)
  if redis.call('GET', filling) == head.group then
    redis.call('DEL', filling)
  end
  if head.right ~= '' then
    --@include held_rights
    return_right(head.series, head.right)
    wake_makers()
  end
end
return cmsgpack.pack('dropped')
