-- Delete a session. If its group has no other one, the group's right returns.
-- KEYS[1] stream
-- ARGV    the call `DropSession` of redrb/gateway/calls.py
-- Returns its reply. Repeated, it does nothing a second time.
--@include task facts waking sessions permissions

check_permissions(KEYS[1])
begin_writing()
local ask = cmsgpack.unpack(ARGV[1])
local session = key('session', ask.session)
local head = head_of(session)
if not head then
  return cmsgpack.pack('unknown')
end
local gathering, filling = key('gathering', head.group), key('filling', head.place)
local over = redis.call('HEXISTS', session, 'over') == 1
redis.call('DEL', session)
if over or redis.call('EXISTS', gathering) == 0 or redis.call('HINCRBY', gathering, 'living', -1) > 0 then
  return cmsgpack.pack('dropped')
end
redis.call('DEL', gathering)
if redis.call('GET', filling) == head.group then
  redis.call('DEL', filling)
end
if head.right ~= '' then
  --@include held_rights
  return_right(head.series, head.right)
  wake_makers()
end
return cmsgpack.pack('dropped')
