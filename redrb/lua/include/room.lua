-- Says whether the limits of a task let a put in.
--@include task clock facts capacity waiters

-- Room for a producer's put of so many groups and bytes, after `put` groups. Returns the reply of the put
-- if there is none, or nil; the groups that may follow, -1 without a limit; and the time if it was read.
local function find_room(producer, put, count, bytes)
  local rule = rules()
  local spi, _, least, most = rate_of()
  if rule.limit == 0 and rule.max_bytes == 0 and not spi then
    return nil, -1, nil
  end
  local now = now_ms()
  if (rule.limit > 0 and count > rule.limit) or (rule.max_bytes > 0 and bytes > rule.max_bytes)
    or (spi and count > (most - least) / spi) then
    return {outcome = 'never'}
  end
  local left = -1
  if rule.limit > 0 then
    left = rule.limit - redis.call('XLEN', stream)
    if left < reserved_before('#room', producer, now, left, count) then
      return {outcome = 'full', setting = 'limit'}
    end
  end
  if spi then
    local allowed = math.min(inserts_left(put), 2 ^ 53) - count -- a rate may have no upper bound
    if allowed < reserved_before('#room', producer, now, allowed, count) then
      return {outcome = 'full', setting = 'rate'}
    end
    left = left < 0 and allowed or math.min(left, allowed)
  end
  if rule.max_bytes > 0 and number(task, 'bytes') + bytes > rule.max_bytes then
    return {outcome = 'full', setting = 'max_bytes'}
  end
  return nil, left, now
end
