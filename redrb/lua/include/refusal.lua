-- Says why a put is not stored; the arguments are those of put/put.lua.
--@include task facts

-- `known` is what the task knows of the producer and its own counters, `forgotten` whether the producer's
-- record may have been removed, `put` the number of groups put, and `bytes` those of the `count` groups.
-- Returns the reply, or nil; how many more groups there is room for; and the time, if it was read.
local function find_refusal(known, forgotten, put, count, bytes)
  local rule, kind = rules(), ARGV[10]
  local earlier = known[1] and {string.match(known[1], '^(%d+) (%d+) (%d+)')}
  if earlier and tonumber(earlier[1]) >= tonumber(ARGV[2]) then
    return {'again', tonumber(earlier[2]), tonumber(earlier[3])}
  elseif ARGV[8] ~= '' and ARGV[8] ~= rule.revision
    or kind ~= '' and (redis.call('HGET', task, 'kind') or kind) ~= kind then
    return {'changed'}
  end
  if ARGV[13] ~= '' then -- says better than the record of the producer whether the put is stored
    --@include parts
    local ended = refused_claim(ARGV[13])
    if ended then
      return ended
    end
  end
  if forgotten then
    return {'forgotten', tonumber(known[6] or '0')}
  end
  if ARGV[12] ~= '' then
    --@include sources
    local refused = refused_sources(ARGV[12])
    if refused then
      return refused
    end
  end
  if rule.limit > 0 or rule.max_bytes > 0 or rule.rate then
    --@include room
    return find_room(ARGV[1], put, count, bytes)
  end
  return nil, -1, nil
end
