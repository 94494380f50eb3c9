-- Says why a put is not stored.
--@include task facts

-- `ask` is the call of put/put.lua, `known` what the task knows of the producer and its own counters,
-- `forgotten` whether the producer's record may have been removed, and `count` the number of groups. Returns
-- the reply, or nil; how many more groups there is room for; and the time, if it was read.
local function find_refusal(ask, known, forgotten, count)
  local rule, kind = rules(), ask.kind
  local earlier = known[1] and {string.match(known[1], '^(%d+) (%d+) (%d+)')}
  if earlier and tonumber(earlier[1]) >= ask.operation then
    return {outcome = 'again', last = tonumber(earlier[2]), stored = tonumber(earlier[3])}
  elseif ask.revision ~= '' and ask.revision ~= rule.revision
    or kind ~= '' and (redis.call('HGET', task, 'kind') or kind) ~= kind then
    return {outcome = 'changed'}
  end
  if ask.parts then -- says better than the record of the producer whether the put is stored
    --@include parts
    if not claimed_record(ask.parts) then
      local group = redis.call('HGET', key('part_ends'), ask.parts.key)
      return {outcome = 'ended', last = tonumber(group or '') or 0}
    end
  end
  if forgotten then
    return {outcome = 'forgotten', epoch = tonumber(known[6] or '0')}
  end
  if ask.sources then
    --@include sources
    local refused = refused_sources(ask.sources)
    if refused then
      return refused
    end
  end
  if ask.saved then -- groups that were stored before need no room
    local before, origin = ask.sources.floor, ask.sources.origin
    local lost = before > 0 and redis.call('HEXISTS', key('sources', origin), before) == 0
    return lost and {outcome = 'gone'} or nil, -1, nil
  end
  if rule.limit > 0 or rule.max_waiting > 0 or rule.max_bytes > 0 then
    --@include room
    return find_room(ask.producer, count, ask.nbytes)
  end
  return nil, -1, nil
end
